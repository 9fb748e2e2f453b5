"""`flopwise sweep FILE.toml`."""

from functools import partial
from typing import Any

import click

from flopwise.api.sweep import sweep
from flopwise.cli import options
from flopwise.cli.output import Answer, answers
from flopwise.render.progress import TerminalProgress
from flopwise.render.run_view import run_view
from flopwise.render.views import screen_of


@click.command("sweep")
@click.argument("file")
@click.option("--device", metavar="auto|cpu|cuda[:N]", help="Where to run; overrides the file.")
@click.option("--fresh", is_flag=True, help="Start again, even if an unfinished run of the same sweep exists.")
@click.option(
    "--retry-failed", is_flag=True, help="Measure the rows that are not ok once more, in the newest run of this sweep."
)
@click.option(
    "--mixed", is_flag=True, help="Go on with a run of another GPU, driver or torch; its table marks the rows of each."
)
@options.on_option
@options.tag_option
@options.run_options
@answers(screens=True)
def command(file: str, tag: str | None, quiet: bool, **given: Any) -> Answer:
    """Measure every workload of FILE, each in its own process; resume an unfinished run where it stopped.

    \b
    Example: flopwise sweep sweeps/cpu-quick.toml
      cpu-quick: workload=tiny, batch=4
    """
    given |= {"command": options.command_line(), "progress": TerminalProgress(quiet=quiet)}
    run, stopped = options.tagged(partial(sweep, file, **given), tag, given["runs"])
    return Answer(partial(run_view, run), lambda: 130 if stopped else 0, screen=partial(screen_of, run))
