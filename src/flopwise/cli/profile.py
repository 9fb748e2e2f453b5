"""`flopwise profile WORKLOAD`."""

from functools import partial
from typing import Any

import click

from flopwise.api.bench import outcome
from flopwise.api.profile import profile
from flopwise.cli import options
from flopwise.cli.output import Answer, answers
from flopwise.render.progress import TerminalProgress
from flopwise.render.run_view import run_view

_WITH = "PyTorch's profiler, or Nsight Systems (a process of its own under nsys; needs a GPU)."


@click.command("profile")
@click.argument("workload")
@options.workload_options
@options.device_option
@click.option("--with", "profiler", default="kineto", show_default=True, metavar="kineto|nsys", help=_WITH)
@click.option("--steps", type=int, default=2, show_default=True, help="How many steps the trace holds.")
@click.option("--stacks", is_flag=True, help="Record Python stacks (kineto; slow, and large).")
@click.option("--memory", is_flag=True, help="Record allocations (kineto).")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="The budget for timing the untraced step.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until it is stopped.")
@options.tag_option
@options.run_options
@answers()
def command(workload: str, tag: str | None, quiet: bool, **given: Any) -> Answer:
    """Capture a trace of WORKLOAD with PyTorch's profiler or Nsight Systems, and measure the profiler's own cost.

    \b
    Example: flopwise profile tiny --device cpu
      tiny b4 t128 train on cpu
    """
    given |= options.workload_arguments(given)
    given |= {"command": options.command_line(), "progress": TerminalProgress(quiet=quiet)}
    run, stopped = options.tagged(partial(profile, workload, **given), tag, given["runs"])
    return Answer(run_view(run), lambda: 130 if stopped else outcome(run))
