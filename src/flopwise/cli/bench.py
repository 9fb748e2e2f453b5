"""`flopwise bench WORKLOAD`."""

from functools import partial
from typing import Any

import click

from flopwise.api.bench import bench, outcome
from flopwise.api.report import report
from flopwise.cli import options
from flopwise.cli.output import Answer, answers
from flopwise.errors import FlopwiseError
from flopwise.render.progress import TerminalProgress
from flopwise.render.views import screen_of, view_of

_VERSUS = "Measure a second workload with these changes, beside the first, in pairs of processes."


@click.command("bench")
@click.argument("workload")
@options.workload_options
@options.device_option
@options.sampling_options
@click.option("--versus", metavar="LEVER=VALUE,…", help=_VERSUS)
@click.option("--impl", metavar="A,B,…", help="Of an operation: its implementations, checked, timed and compared.")
@options.tag_option
@options.run_options
@answers(pages=True, screens=True)
def command(workload: str, versus: str | None, impl: str | None, tag: str | None, quiet: bool, **given: Any) -> Answer:
    """Time forward, backward, optimizer and the whole step of WORKLOAD, each with three clocks.

    \b
    Example: flopwise bench tiny --device cpu
      tiny b4 t128 train on cpu
      A step takes 38.3 ms.

    WORKLOAD is a preset (tiny, small, medium, large, xl, 2.7B, gpt2, llama3-8b, …), hf:PATH/config.json, your own step
    (path/file.py:factory or py:module:factory; --set has the factory's arguments), or an operation: op:matmul, op:mlp,
    op:attention, op:gelu, op:softmax, op:rms_norm, op:swiglu, op:rope, op:cross_entropy, op:adamw
    (--impl manual,torch,compile,triton,…), or between ranks op:all-reduce, op:all-gather, op:reduce-scatter, op:all-to-all,
    op:send-recv (--set bytes=10MB --ranks 2 --impl nccl,gloo). With -o page.html the run is written as a page.
    """
    impls = [word.strip() for word in impl.split(",") if word.strip()] if impl is not None else []
    if impl is not None and not impls:
        raise FlopwiseError("--impl names no implementation", "give one or several, separated by commas")
    arguments = options.workload_arguments(given) | ({"impl": impls[0]} if len(impls) == 1 else {})
    arguments |= {"command": options.command_line(), "progress": TerminalProgress(quiet=quiet)}
    changes = None if versus is None else options.assignments((versus,) if versus else ())
    several = impls if len(impls) > 1 else ()
    measure = partial(bench, workload, versus=changes, impls=several, **arguments, **given)
    run, stopped = options.tagged(measure, tag, given["runs"])
    return Answer(
        partial(view_of, run),
        lambda: 130 if stopped else 0 if several else outcome(run),
        lambda place: report(run, output=place, command=options.command_line()),
        table_too=True,
        screen=partial(screen_of, run),
    )
