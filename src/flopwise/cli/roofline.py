"""`flopwise roofline TARGET`."""

from typing import Any

import click

from flopwise.api.roofline import roofline
from flopwise.cli.options import output_options, runs_option, workload_arguments, workload_options
from flopwise.cli.output import PICTURE, chosen_format, show, write_picture
from flopwise.errors import FlopwiseError
from flopwise.render.roofline_view import drawn, roofline_view


@click.command("roofline")
@click.argument("target")
@workload_options
@click.option("--gpu", metavar="NAME", help="h100, h200, …: whose limits; a trace names its own GPU.")
@runs_option
@output_options
def command(target: str, gpu: str | None, runs: str | None, form: str | None, output: str | None, **given: Any) -> None:
    """Compare every operation with the machine's limits: FLOPs per byte, FLOP/s reached, and the share of what is possible.

    Example: flopwise roofline small --gpu h200 -o roofline.svg

    TARGET is a run with a trace or a trace file (as measured: every op whose bytes follow from its inputs, and what is left
    out), or a workload (all operations, as predicted). -o FILE.svg, .png or .html draws it.
    """
    form = chosen_format(form, output, draws=True)
    found = roofline(target, gpu=gpu, runs=runs, **workload_arguments(given))
    if form != PICTURE:
        show(roofline_view(found), form, output)
        return
    show(roofline_view(found), "table", None)
    if not found.points or output is None:
        raise FlopwiseError(f"{output} is not drawn: no operation has a point", "the table says why")
    write_picture(drawn(found), output)
