"""`flopwise bench WORKLOAD`."""

from functools import partial
from typing import Any

import click

from flopwise.cli.options import (
    assignments,
    command_line,
    device_option,
    output_options,
    run_options,
    sampling_options,
    workload_arguments,
    workload_options,
)  # fmt: skip
from flopwise.cli.output import chosen, kept, show
from flopwise.errors import FlopwiseError


@click.command("bench")
@click.argument("workload")
@workload_options
@device_option
@sampling_options
@click.option(
    "--versus", metavar="LEVER=VALUE,…", help="Measure a second workload, so changed, in turns with the first."
)
@click.option("--impl", metavar="A,B,…", help="Of an operation: its implementations, checked, timed and compared.")
@click.option("--tag", help="A name for the run.")
@run_options
@output_options
def command(
    workload: str,
    form: str | None,
    output: str | None,
    versus: str | None,
    impl: str | None,
    tag: str | None,
    quiet: bool,
    **given: Any,
) -> int:
    """Time forward, backward, optimizer and the whole step of WORKLOAD, each with three clocks.

    Example: flopwise bench tiny --device cpu

    WORKLOAD is a preset (tiny, small, medium, large, xl, 2.7B, gpt2, llama3-8b, …), hf:PATH/config.json,
    py:module:factory (your own step), or an operation: op:matmul, op:mlp, op:attention, op:gelu, op:softmax,
    op:rms_norm, op:swiglu, op:rope, op:cross_entropy, op:adamw (--impl manual,torch,compile,triton,…).
    """
    form = chosen(form, output)
    from flopwise.api.bench import bench, outcome
    from flopwise.api.compare import compare_within
    from flopwise.render.comparison_view import comparison_view
    from flopwise.render.implementations_view import implementations_view
    from flopwise.render.progress import ShownProgress
    from flopwise.render.run_view import run_view
    from flopwise.store import check_tag, runs_root
    from flopwise.store import tag as tag_run

    if tag is not None:
        check_tag(tag)  # before anything is measured
    impls = [word.strip() for word in impl.split(",") if word.strip()] if impl is not None else []
    if impl is not None and not impls:
        raise FlopwiseError("--impl names no implementation", "give one or several, separated by commas")
    shown = ShownProgress(quiet=quiet)
    arguments = workload_arguments(given) | ({"impl": impls[0]} if len(impls) == 1 else {})
    measure = partial(
        bench,
        workload,
        versus=None if versus is None else assignments((versus,) if versus else ()),
        impls=impls if len(impls) > 1 else (),
    )
    run, stopped = kept(partial(measure, **arguments, command=command_line(), progress=shown, **given))
    if tag is not None:
        tag_run(runs_root(given["runs"]), run.path, tag)
    tables, document = run_view(run)
    if len(impls) > 1:
        tables, document = implementations_view(run, document)
    if versus is not None and (compared := compare_within(run)) is not None:
        against, inner = comparison_view(compared.pairs, (), ())
        tables, document = [*tables, *against], document | {"comparison": inner}
    show(tables, document, form, output)
    return 130 if stopped else outcome(run) if len(impls) < 2 else 0
