"""`flopwise profile WORKLOAD`."""

from typing import Any

import click

from flopwise.api.bench import outcome
from flopwise.api.profile import profile
from flopwise.cli.options import (
    command_line,
    device_option,
    output_options,
    run_options,
    tag_option,
    tagged,
    workload_arguments,
    workload_options,
)
from flopwise.cli.output import chosen_format, show
from flopwise.render.progress import TerminalProgress
from flopwise.render.run_view import run_view

_WITH = "PyTorch's profiler, or Nsight Systems (a process of its own under nsys; needs a GPU)."


@click.command("profile")
@click.argument("workload")
@workload_options
@device_option
@click.option("--with", "profiler", default="kineto", show_default=True, metavar="kineto|nsys", help=_WITH)
@click.option("--steps", type=int, default=2, show_default=True, help="How many steps the trace holds.")
@click.option("--stacks", is_flag=True, help="Record Python stacks (kineto; slow, and large).")
@click.option("--memory", is_flag=True, help="Record allocations (kineto).")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="The budget for timing the untraced step.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until it is stopped.")
@tag_option
@run_options
@output_options
def command(workload: str, form: str | None, output: str | None, tag: str | None, quiet: bool, **given: Any) -> int:
    """Capture a trace of WORKLOAD with PyTorch's profiler or Nsight Systems, and measure the profiler's own cost.

    Example: flopwise profile tiny --device cpu
    """
    form = chosen_format(form, output)
    arguments = workload_arguments(given) | {"command": command_line(), "progress": TerminalProgress(quiet=quiet)}
    run = tagged(lambda: profile(workload, **arguments, **given), tag, given["runs"])
    show(run_view(run), form, output)
    return outcome(run)
