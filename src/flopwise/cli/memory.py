"""`flopwise memory SNAPSHOT`."""

from pathlib import Path

import click

from flopwise.cli.options import output_options
from flopwise.cli.output import check_place, chosen, said, show


@click.command("memory")
@click.argument("snapshot")
@click.option(
    "--device", metavar="cuda:N", help="Which GPU of the snapshot; without it, the one with the highest peak."
)
@click.option("--stacks", is_flag=True, help="Whole stacks in JSON, not only your own frames.")
@output_options
def command(snapshot: str, device: str | None, stacks: bool, form: str | None, output: str | None) -> None:
    """Say who holds the memory at the peak and over time, the largest allocations with their stacks, and what leaks.

    Example: flopwise memory snapshot.pickle

    SNAPSHOT is what torch.cuda.memory._dump_snapshot writes (.pickle, .pickle.gz); it is read without being run. With
    -o FILE.svg, .png or .html the timeline is drawn, stacked by owner.
    """
    from flopwise.render.charts import SUFFIXES

    drawn = form is None and output is not None and Path(output).suffix in SUFFIXES
    check_place(output)
    form = "" if drawn else chosen(form, output)
    from flopwise.render.memory_view import memory_view, of_device, timeline_chart
    from flopwise.verbs.memory import memory

    found = of_device(memory(snapshot, stacks=stacks), device)
    if drawn and output is not None:
        from flopwise.render.charts import save

        save(timeline_chart(found), Path(output).expanduser())
        said(f"wrote {output}")
        return
    show(*memory_view(found), form, output)
