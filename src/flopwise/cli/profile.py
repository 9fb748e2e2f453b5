"""`flopwise profile WORKLOAD`."""

from functools import partial
from typing import Any

import click

from flopwise.cli.options import (
    command_line,
    device_option,
    output_options,
    run_options,
    workload_arguments,
    workload_options,
)
from flopwise.cli.output import chosen, kept, show


@click.command("profile")
@click.argument("workload")
@workload_options
@device_option
@click.option(
    "--with",
    "profiler",
    default="kineto",
    show_default=True,
    metavar="kineto|nsys",
    help="PyTorch's profiler, or Nsight Systems (a process of its own under nsys; needs a GPU).",
)
@click.option("--steps", type=int, default=2, show_default=True, help="How many steps the trace holds.")
@click.option("--stacks", is_flag=True, help="Record Python stacks (kineto; slow, and large).")
@click.option("--memory", is_flag=True, help="Record allocations (kineto).")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="The budget for timing the untraced step.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until it is ended.")
@click.option("--tag", help="A name for the run.")
@run_options
@output_options
def command(workload: str, form: str | None, output: str | None, tag: str | None, quiet: bool, **given: Any) -> int:
    """Capture a trace of WORKLOAD by PyTorch's profiler or Nsight Systems, and what the profiler itself costs.

    Example: flopwise profile tiny --device cpu
    """
    form = chosen(form, output)
    from flopwise.api.bench import outcome
    from flopwise.api.profile import profile
    from flopwise.render.progress import ShownProgress
    from flopwise.render.run_view import run_view
    from flopwise.store import check_tag, runs_root
    from flopwise.store import tag as tag_run

    if tag is not None:
        check_tag(tag)  # before anything is measured
    shown = ShownProgress(quiet=quiet)
    measure = partial(profile, workload, **workload_arguments(given), command=command_line(), progress=shown, **given)
    run, stopped = kept(measure)
    if tag is not None:
        tag_run(runs_root(given["runs"]), run.path, tag)
    tables, document = run_view(run)
    show(tables, document, form, output)
    return 130 if stopped else outcome(run)
