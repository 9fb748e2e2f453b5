"""`flopwise lab [NAME…]`."""

from functools import partial
from typing import Any

import click

from flopwise.cli.options import command_line, device_option, output_options, run_options
from flopwise.cli.output import PICTURE, chosen, kept, said, show


@click.command("lab")
@click.argument("name", nargs=-1)
@click.option("--quick", is_flag=True, help="Fewer sizes and samples: all of them in about a minute or two.")
@click.option("--workload", metavar="WORKLOAD", help="For experiments that look at a model: a preset, hf:… or py:….")
@device_option
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds until an experiment is ended.")
@run_options
@output_options
def command(name: tuple[str, ...], form: str | None, output: str | None, quiet: bool, **given: Any) -> int:
    """Measure claims about GPUs on this machine. Without NAME: list the experiments; NAME may be all.

    Example: flopwise lab data-types --quick --device cpu

    Each experiment runs in a process of its own and ends in a verdict: confirmed, refuted here, inconclusive, or not
    measurable here; with the numbers. -o FILE writes tables (.md, .csv, .json), the charts (.svg, .png) or a page (.html).
    """
    form = chosen(form, output, draws=True)
    from flopwise.experiments.catalog import experiments
    from flopwise.render.lab_view import lab_view, list_view

    if not name:
        if form == PICTURE:
            raise click.UsageError("a list has no pictures: name an experiment")
        show(*list_view(experiments().values()), form, output)
        if given["quick"] or given["workload"] or given["device"] != "auto":
            said("nothing was run: name an experiment, or all, as in flopwise lab all --quick")
        return 0
    from flopwise.api.lab import lab, outcome
    from flopwise.render.lab_progress import ShownLab

    found, _ = kept(partial(lab, *name, command=command_line(), progress=ShownLab(quiet=quiet), **given))
    tables, document = lab_view(found)
    if not (quiet and form == PICTURE):
        show(tables, document, *(("table", None) if form == PICTURE else (form, output)))
    if form == PICTURE and output is not None:
        from flopwise.api.lab import write_pictures

        write_pictures(found, output, runs=given["runs"], command=command_line())
        said(f"wrote {output}")
    return outcome(found)
