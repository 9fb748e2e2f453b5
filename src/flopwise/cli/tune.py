"""`flopwise tune WORKLOAD`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from flopwise import units
from flopwise.advice.moves import ON_REQUEST
from flopwise.api.report import report
from flopwise.api.tune import tune
from flopwise.cli import options
from flopwise.cli.output import PAGES, Answer, answers, check_place, kept, write_text
from flopwise.errors import FlopwiseError
from flopwise.records.tuning import Tuning
from flopwise.render.charts import SUFFIXES as PICTURES
from flopwise.render.charts import save
from flopwise.render.progress import TerminalProgress
from flopwise.render.step_charts import limit_chart
from flopwise.render.tune_screen import tune_screen
from flopwise.render.tune_view import tune_view, tuned_limit, verdict
from flopwise.store import runs_root

_SECONDS = "For each lever; no further pair of processes begins after three times as long."
_ALLOW = "Try what rounds more than bf16, too; what it costs in accuracy is said."
_BUDGET = "No lever is started after it: 90s, 10m."


@click.command("tune")
@click.argument("workload")
@options.workload_options
@options.device_option
@options.on_option
@click.option("--budget", default="10m", show_default=True, metavar="TIME", help=_BUDGET)
@click.option("--memory-limit", metavar="SIZE", help="The most a step may hold: 40GiB.")
@click.option("--keep-exact", is_flag=True, help="Only levers that round as fp32 does.")
@click.option("--allow", multiple=True, type=click.Choice(list(ON_REQUEST)), help=_ALLOW)
@click.option("--seconds", type=float, default=6.0, show_default=True, help=_SECONDS)
@click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until a step is stopped.")
@click.option("--save", metavar="FILE.toml", help="Write the recipe there.")
@options.run_options
@answers(pages=PICTURES, screens=True)
def command(
    workload: str, budget: str, memory_limit: str | None, save: str | None, quiet: bool, **given: Any
) -> Answer:
    """Try the levers on WORKLOAD, keep what is faster (or smaller) and still correct, and prove it.

    \b
    Example: flopwise tune tiny --device cpu --budget 60s
      tiny b4 t128 train on cpu
      1.31 times as fast: 38.3 ms → 29.2 ms; 2 of 6 attempts kept.

    Each lever is measured against the best step so far, most promising first; its losses and gradients are compared with
    the same step in eager fp32. The answer is a recipe; --full has the lines of PyTorch and every saving.
    WORKLOAD is as for bench; your own step is path/file.py:factory. With -o page.html the whole tuning is written as a page; with
    -o FILE.png or .svg the way from the power-capped limit to the tuned step is drawn.
    """
    check_place(save)
    _check_picture(click.get_current_context().params["output"], given["device"])
    measure = partial(
        tune,
        workload,
        budget=units.parse_duration(budget) / 1e9,
        memory_limit=None if memory_limit is None else units.parse_size(memory_limit),
        command=options.command_line(),
        progress=TerminalProgress(quiet=quiet),
        **options.workload_arguments(given),
        **given,
    )
    tuning, stopped = kept(measure)
    view = tune_view(tuning)
    if save is not None:
        write_text(view.document["recipe_toml"] + "\n", save)
    return Answer(
        view,
        lambda: 130 if stopped else 0,
        partial(_write, tuning, runs_root(given["runs"]) / tuning.run),
        table_too=True,
        screen=partial(tune_screen, tuning),
    )


def _check_picture(output: str | None, device: str) -> None:
    """No minutes of tuning for a picture that cannot be drawn."""
    if output is not None and device == "cpu" and Path(output).suffix in PICTURES and Path(output).suffix not in PAGES:
        raise FlopwiseError(
            f"{output} would show the limit of a GPU, and device = cpu has none", "-o page.html has the rest"
        )


def _write(tuning: Tuning, run: Path, place: Path) -> None:
    """A page of the whole tuning, or a picture of what is left of the tuned step."""
    if place.suffix in PAGES:
        report(run, output=place, command=options.command_line())
        return
    limit = tuned_limit(tuning)
    if limit is None:
        raise FlopwiseError(
            "the tuned step has no limit to draw", "its trace tells one, on a GPU; -o page.html has the rest"
        )
    save(limit_chart(limit, verdict(tuning)), place)
