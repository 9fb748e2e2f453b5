"""`flopwise run SCRIPT ARGS…`."""

import sys
from functools import partial
from typing import Any

import click

from flopwise.advice.explained import explained_run
from flopwise.advice.explained_ranks import ranks_verdict
from flopwise.api.run import run
from flopwise.cli import options
from flopwise.cli.output import Answer, answers, kept
from flopwise.errors import FlopwiseError
from flopwise.render.loop_screen import loop_screen
from flopwise.render.run_view import run_view
from flopwise.render.views import view_of
from flopwise.spec.fields import did_you_mean
from flopwise.store import StoredRun

_CONTINUE = "Let the script run to its own end; after the look it runs as if unwatched."


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--steps", type=int, help="How many steps to time. By default as many as are needed.")
@click.option("--traced", type=int, default=2, show_default=True, help="How many steps to trace after them.")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="The longest warm-up.")
@click.option("--continue", "go_on", is_flag=True, help=_CONTINUE)
@options.run_options
@click.argument("script", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGS]…")
@answers(screens=True)
def command(script: tuple[str, ...], quiet: bool, **given: Any) -> Answer:
    """Run your own training script, unchanged, and say why its steps are slow and what to change.

    \b
    Example: flopwise run train.py --batch 8
      6 steps timed: train.py on the CPU
      Op-bound: ops take 99% of the traced step; the largest is aten::mm, 45%.

    Its steps are found by the updates of its optimizer. Some are timed, two are traced, then the script is ended. What comes
    after SCRIPT goes to the script. Under torchrun: torchrun --nproc-per-node 8 -m flopwise run train.py
    """

    def note(text: str) -> None:
        if not quiet:
            click.echo(f"flopwise: {text}", err=True)

    name, *arguments = script
    if name.startswith("-"):
        known = [option for one in click.get_current_context().command.params for option in one.opts]
        raise FlopwiseError(
            f"there is no option '{name}'", f"{did_you_mean(name, known)}flopwise run --help has them all"
        )
    given |= {"command": options.command_line(), "note": note}
    found, stopped = kept(partial(run, name, arguments, **given))
    sys.stdout.flush()
    if found is None:
        raise SystemExit(0)  # the first rank shows it
    explanation = explained_run(found)
    return Answer(
        run_view(found) if explanation is None else view_of(explanation),
        lambda: 130 if stopped else _code(found),
        screen=lambda: loop_screen(found, explanation, ranks_verdict(found)),
    )


def _code(run: StoredRun) -> int:
    """The script's own, where it ended by itself."""
    loop = run.points[0].loop
    return (loop.exit_code or 0) if loop is not None else 0
