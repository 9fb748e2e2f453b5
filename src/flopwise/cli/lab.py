"""`flopwise lab [NAME…]`."""

from functools import partial
from typing import Any

import click

from flopwise.api.lab import lab, outcome, write_pictures
from flopwise.cli.options import command_line, device_option, run_options
from flopwise.cli.output import Answer, answers, kept, notify
from flopwise.experiments.catalog import experiments
from flopwise.render.lab_progress import ShownLab
from flopwise.render.lab_view import lab_view, list_view


@click.command("lab")
@click.argument("name", nargs=-1)
@click.option("--quick", is_flag=True, help="Fewer sizes and samples: all of them in a minute or two.")
@click.option("--workload", metavar="WORKLOAD", help="For experiments that look at a model: a preset, hf:… or py:….")
@device_option
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds until an experiment is stopped.")
@run_options
@answers(draws=True)
def command(name: tuple[str, ...], quiet: bool, picture: bool, **given: Any) -> Answer:
    """Measure claims about GPUs on this machine. Without NAME: list the experiments; NAME may be all.

    \b
    Example: flopwise lab data-types --quick --device cpu
      1 experiment on x86_64: 1 confirmed

    Each experiment runs in a process of its own and ends in a verdict: confirmed, refuted here, inconclusive, or not
    measurable here; with the numbers. -o FILE writes tables (.md, .csv, .json), the charts (.svg, .png) or a page (.html).
    """
    if not name:
        if picture:
            raise click.UsageError("a list has no pictures: name an experiment")
        if given["quick"] or given["workload"] or given["device"] != "auto":
            notify("nothing was run: name an experiment, or all, as in flopwise lab all --quick")
        return Answer(list_view(experiments().values()))
    found, _ = kept(partial(lab, *name, command=command_line(), progress=ShownLab(quiet=quiet), **given))
    write = partial(write_pictures, found, runs=given["runs"], command=command_line())
    return Answer(lab_view(found), partial(outcome, found), write, table_too=not quiet)
