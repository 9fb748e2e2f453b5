"""`flopwise bench WORKLOAD`."""

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
from flopwise.cli.output import chosen, show


@click.command("bench")
@click.argument("workload")
@workload_options
@device_option
@sampling_options
@click.option(
    "--versus", metavar="LEVER=VALUE,…", help="Measure a second workload, so changed, in turns with the first."
)
@click.option("--tag", help="A name for the run.")
@run_options
@output_options
def command(
    workload: str, form: str | None, output: str | None, versus: str | None, tag: str | None, quiet: bool, **given: Any
) -> int:
    """Time forward, backward, optimizer and the whole step of WORKLOAD, each with three clocks.

    Example: flopwise bench tiny --device cpu

    WORKLOAD is a preset (tiny, small, medium, large, xl, 2.7B, gpt2, llama3-8b, …), hf:PATH/config.json,
    py:module:factory (your own step), or op:matmul, op:mlp, op:attention, op:gelu, op:softmax.
    """
    form = chosen(form, output)
    from flopwise.render.comparison_view import comparison_view
    from flopwise.render.progress import ShownProgress
    from flopwise.render.run_view import run_view
    from flopwise.store import check_tag, runs_root
    from flopwise.store import tag as tag_run
    from flopwise.verbs.bench import bench, outcome
    from flopwise.verbs.compare import compare_within

    if tag is not None:
        check_tag(tag)  # before anything is measured
    run = bench(
        workload,
        **workload_arguments(given),
        versus=None if versus is None else assignments((versus,) if versus else ()),
        command=command_line(),
        progress=ShownProgress(quiet=quiet),
        **given,
    )
    if tag is not None:
        tag_run(runs_root(given["runs"]), run.path, tag)
    tables, document = run_view(run)
    if versus is not None and (compared := compare_within(run)) is not None:
        against, inner = comparison_view(compared.pairs, (), ())
        tables, document = [*tables, *against], document | {"comparison": inner}
    show(tables, document, form, output)
    return outcome(run)
