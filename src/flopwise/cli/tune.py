"""`flopwise tune WORKLOAD`."""

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
from flopwise.cli.output import chosen, kept, show, write_text


@click.command("tune")
@click.argument("workload")
@workload_options
@device_option
@click.option(
    "--budget", default="10m", show_default=True, metavar="TIME", help="No lever is begun after it: 90s, 10m."
)
@click.option("--memory-limit", metavar="SIZE", help="The most a step may hold: 40GiB.")
@click.option("--keep-exact", is_flag=True, help="Only levers that round as fp32 does.")
@click.option("--seconds", type=float, default=3.0, show_default=True, help="The budget for sampling each lever.")
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until a step is ended.")
@click.option("--save", metavar="FILE.toml", help="Write the recipe there.")
@run_options
@output_options
def command(
    workload: str,
    form: str | None,
    output: str | None,
    budget: str,
    memory_limit: str | None,
    save: str | None,
    quiet: bool,
    **given: Any,
) -> int:
    """Try the levers on WORKLOAD, keep what is faster (or smaller) and still right, and prove it.

    Example: flopwise tune tiny --device cpu --budget 60s

    Each lever runs interleaved with the best step so far, most promising first; its losses and gradients are compared with
    the same step in eager fp32. The answer is a recipe, the lines of PyTorch, and every predicted and measured saving.
    """
    form = chosen(form, output)
    from flopwise import units
    from flopwise.api.tune import tune
    from flopwise.cli.output import check_place
    from flopwise.render.progress import ShownProgress
    from flopwise.render.tune_view import tune_view

    check_place(save)
    measure = partial(
        tune,
        workload,
        budget=units.parse_duration(budget) / 1e9,
        memory_limit=None if memory_limit is None else units.parse_size(memory_limit),
        command=command_line(),
        progress=ShownProgress(quiet=quiet),
        **workload_arguments(given),
        **given,
    )
    tuning, stopped = kept(measure)
    tables, document = tune_view(tuning)
    try:
        show(tables, document, form, output)
    finally:
        if save is not None:
            write_text(document["recipe_toml"] + "\n", save)
    return 130 if stopped else 0
