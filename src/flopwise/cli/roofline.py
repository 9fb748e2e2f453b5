"""`flopwise roofline TARGET`."""

from pathlib import Path
from typing import Any

import click

from flopwise.cli.options import output_options, workload_arguments, workload_options
from flopwise.cli.output import PICTURE, chosen, said, show
from flopwise.errors import FlopwiseError


@click.command("roofline")
@click.argument("target")
@workload_options
@click.option("--gpu", metavar="NAME", help="h100, h200, …: whose roofs; a trace names its own GPU.")
@click.option("--runs", metavar="DIR", help="Where runs are kept.")
@output_options
def command(target: str, gpu: str | None, runs: str | None, form: str | None, output: str | None, **given: Any) -> None:
    """Set every operation against the machine's ceilings: FLOPs per byte, FLOP/s reached, and the share of what is possible.

    Example: flopwise roofline small --gpu h200 -o roofline.svg

    TARGET is a run with a trace or a trace file (as measured: every op whose bytes follow from its inputs, and what is left out),
    or a workload (all operations, as predicted).
    -o FILE.svg, .png or .html draws it.
    """
    form = chosen(form, output, draws=True)
    picture = form == PICTURE
    from flopwise.api.roofline import roofline
    from flopwise.render.roofline_view import drawn, roofline_view

    found = roofline(target, gpu=gpu, runs=runs, **workload_arguments(given))
    view = roofline_view(found, for_programs=form == "csv")
    show(*view, "table" if picture else form, None if picture else output)
    if picture and not found.points:
        raise FlopwiseError(f"{output} is not drawn: no operation has a point", "the table says why")
    if picture and output is not None:
        from flopwise.render.charts import save

        save(drawn(found), Path(output).expanduser())
        said(f"wrote {output}")
