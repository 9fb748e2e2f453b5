"""`flopwise demo`."""

from pathlib import Path

import click

from flopwise.api.demo import Part, Title, demo
from flopwise.cli.options import device_option, run_options
from flopwise.cli.output import show
from flopwise.predict.account import Account
from flopwise.records.table import Table
from flopwise.render import account_view
from flopwise.render.machine_view import doctor_view
from flopwise.render.progress import TerminalProgress
from flopwise.render.table import View
from flopwise.render.views import view_of
from flopwise.snapshot.answers import MemoryReport


@click.command("demo")
@device_option
@run_options
def command(device: str, runs: str | None, quiet: bool) -> None:
    """Show what flopwise does, on this machine, in about a minute; it ends with a page of all results.

    Example: flopwise demo

    It checks the machine, times a step, compares two variants, sweeps a few sizes, profiles a step,
    shows its memory and predicts a larger one.
    """
    pages: list[Path] = []

    def tell(part: Part) -> None:
        match part:
            case Title():
                click.secho(part.text, bold=True)
            case str():
                click.echo(f"{part}\n")
            case Path():
                pages.append(part)
            case _:
                show(View(_tables(part), {}), "table", None)
                click.echo()

    demo(tell, device=device, runs=runs, progress=TerminalProgress(quiet=quiet))
    click.echo("Next: flopwise runs; flopwise bench small --help; docs/tutorial.md")
    for page in pages:
        click.echo(f"The page, to open in a browser: {page}")


def _tables(part: Part) -> list[Table]:
    """The tables of a result; of those with many, the first to look at."""
    match part:
        case list():
            return doctor_view(part).tables
        case MemoryReport():
            return view_of(part).tables[:2]
        case Account():
            first = (account_view.SUMMARY, account_view.GPUS, account_view.TIMES)
            return [table for table in view_of(part).tables if table.key in first]
        case _:
            return view_of(part).tables
