"""`flopwise sweep FILE.toml`."""

from functools import partial
from typing import Any

import click

from flopwise.cli.options import command_line, output_options, run_options
from flopwise.cli.output import chosen, kept, show


@click.command("sweep")
@click.argument("file")
@click.option("--device", metavar="auto|cpu|cuda[:N]", help="Where to run, whatever the file says.")
@click.option("--fresh", is_flag=True, help="Begin anew, even if an unfinished run of the same sweep is there.")
@click.option("--tag", help="A name for the run.")
@run_options
@output_options
def command(file: str, tag: str | None, quiet: bool, form: str | None, output: str | None, **given: Any) -> int:
    """Measure every workload of FILE, each in its own process; go on where an unfinished run of it stopped.

    Example: flopwise sweep sweeps/cpu-quick.toml
    """
    form = chosen(form, output)
    from flopwise.api.sweep import sweep
    from flopwise.render.progress import ShownProgress
    from flopwise.render.run_view import run_view
    from flopwise.store import check_tag, runs_root
    from flopwise.store import tag as tag_run

    if tag is not None:
        check_tag(tag)  # before anything is measured
    run, stopped = kept(partial(sweep, file, command=command_line(), progress=ShownProgress(quiet=quiet), **given))
    if tag is not None:
        tag_run(runs_root(given["runs"]), run.path, tag)
    tables, document = run_view(run)
    show(tables, document, form, output)
    return 130 if stopped else 0
