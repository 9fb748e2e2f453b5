"""`flopwise roofline TARGET`."""

from pathlib import Path
from typing import Any

import click

from flopwise.api.roofline import roofline
from flopwise.cli.options import runs_option, workload_arguments, workload_options
from flopwise.cli.output import Answer, answers
from flopwise.errors import FlopwiseError
from flopwise.render.charts import save
from flopwise.render.roofline_view import drawn, roofline_view


@click.command("roofline")
@click.argument("target")
@workload_options
@click.option("--gpu", metavar="NAME", help="h100, h200, …: whose limits; a trace names its own GPU.")
@runs_option
@answers(draws=True)
def command(target: str, gpu: str | None, runs: str | None, picture: bool, **given: Any) -> Answer:
    """Compare every operation with the machine's limits: FLOPs per byte, FLOP/s reached, and the share of what is possible.

    \b
    Example: flopwise roofline small --gpu h200 -o roofline.svg
      small b4 t512 train on H200 SXM 141 GB, predicted

    TARGET is a run with a trace or a trace file (as measured: every op whose bytes follow from its inputs, and what is left
    out), or a workload (all operations, as predicted). -o FILE.svg, .png or .html draws it.
    """
    found = roofline(target, gpu=gpu, runs=runs, **workload_arguments(given))

    def write(place: Path) -> None:
        if not found.points:
            raise FlopwiseError(f"{place} is not drawn: no operation has a point", "the table says why")
        save(drawn(found), place)

    return Answer(roofline_view(found), write=write, table_too=True)
