"""`flopwise sweep FILE.toml`."""

from typing import Any

import click

from flopwise.api.bench import interrupted
from flopwise.api.sweep import sweep
from flopwise.cli.options import command_line, output_options, run_options, tag_option, tagged
from flopwise.cli.output import chosen_format, show
from flopwise.render.progress import TerminalProgress
from flopwise.render.run_view import run_view


@click.command("sweep")
@click.argument("file")
@click.option("--device", metavar="auto|cpu|cuda[:N]", help="Where to run; overrides the file.")
@click.option("--fresh", is_flag=True, help="Start again, even if an unfinished run of the same sweep exists.")
@tag_option
@run_options
@output_options
def command(file: str, tag: str | None, quiet: bool, form: str | None, output: str | None, **given: Any) -> int:
    """Measure every workload of FILE, each in its own process; resume an unfinished run where it stopped.

    Example: flopwise sweep sweeps/cpu-quick.toml
    """
    form = chosen_format(form, output)
    given |= {"command": command_line(), "progress": TerminalProgress(quiet=quiet)}
    run = tagged(lambda: sweep(file, **given), tag, given["runs"])
    show(run_view(run), form, output)
    return 130 if interrupted(run) else 0
