"""`flopwise demo`."""

from pathlib import Path

import click

from flopwise.cli.options import device_option, run_options


@click.command("demo")
@device_option
@run_options
def command(device: str, runs: str | None, quiet: bool) -> None:
    """Tell the whole story on this machine in about a minute: doctor, bench, a comparison in turns, a sweep, a profile,
    memory and accounting; it ends with a page of all of it.

    Example: flopwise demo
    """
    from flopwise.analysis.explanation import Explanation
    from flopwise.api.compare import Compared
    from flopwise.api.demo import Part, Title, demo
    from flopwise.cli.output import show
    from flopwise.predict.account import Account
    from flopwise.render.account_view import account_view
    from flopwise.render.comparison_view import comparison_view
    from flopwise.render.doctor_view import doctor_view
    from flopwise.render.explain_view import explanation_view
    from flopwise.render.memory_view import memory_view
    from flopwise.render.progress import ShownProgress
    from flopwise.render.run_view import run_view
    from flopwise.snapshot.answers import MemoryReport
    from flopwise.store import StoredRun

    pages: list[Path] = []

    def tell(part: Part) -> None:
        match part:
            case Title():
                click.secho(part.text, bold=True)
                return
            case str():
                click.echo(f"{part}\n")
                return
            case Path():
                pages.append(part)
                return
            case StoredRun():
                tables, _ = run_view(part)
            case Compared():
                tables, _ = comparison_view(part.pairs, part.only_a, part.only_b)
            case Explanation():
                tables, _ = explanation_view(part)
            case MemoryReport():
                tables = memory_view(part)[0][:2]
            case Account():
                tables = [
                    t for t in account_view(part)[0] if t.title.startswith(("account", "on the GPU", "predicted"))
                ]
            case _:
                tables, _ = doctor_view(part)
        show(tables, {}, "table", None)
        click.echo()

    demo(tell, device=device, runs=runs, progress=ShownProgress(quiet=quiet))
    click.echo("Next: flopwise runs; flopwise bench small --help; docs/tutorial.md")
    for page in pages:
        click.echo(f"The page, to open in a browser: {page}")
