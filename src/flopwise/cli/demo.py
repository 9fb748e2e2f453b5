"""`flopwise demo`."""

from dataclasses import replace
from pathlib import Path
from textwrap import fill

import click

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.measured import MeasuredRun
from flopwise.api.demo import Part, Title, demo
from flopwise.cli.options import device_option, run_options
from flopwise.cli.output import console
from flopwise.records.tuning import Tuning
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.host_screen import host_screen
from flopwise.render.one_screen import text
from flopwise.render.progress import TerminalProgress
from flopwise.render.run_screen import run_screen
from flopwise.render.screen import WIDTH, Screen
from flopwise.render.staircase import staircase


@click.command("demo")
@device_option
@run_options
def command(device: str, runs: str | None, quiet: bool) -> None:
    """Show the main job in under a minute: a slow step explained, tuned, compared, and the page. No GPU is needed.

    \b
    Example: flopwise demo
      Why is this training step slow? Its trace on an H200: …

    Without a GPU the step is one of an H200, whose trace and tuning ship with flopwise.
    """
    demo(_tell, device=device, runs=runs, progress=TerminalProgress(quiet=quiet))
    click.echo("Next, your own: flopwise run train.py; flopwise explain trace.json")


def _tell(part: Part) -> None:
    match part:
        case Title():
            click.secho(part.text, bold=True, nl=not part.command)
            if part.command:
                click.secho(f"  ({part.command})", dim=True)
        case str():
            click.echo(_filled(part))
        case Path():
            click.echo(f"The page, to open in a browser: {part}")
        case Explanation():
            _screen(explanation_screen(part))
        case HostExplanation():
            _screen(host_screen(part))
        case Tuning():
            click.echo("\n".join(staircase(part, 6)) + "\n")
        case MeasuredRun():
            found = run_screen(part)
            click.echo(_filled(found.verdict) if found is not None else "")


def _filled(words: str) -> str:
    return fill(words, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _screen(found: Screen) -> None:
    """Without its title, notes and what is behind --full."""
    shown = text(replace(found, notes=(), more=""), console())
    click.echo(shown.partition("\n")[2].rstrip() + "\n")
