"""The main job in under a minute: a slow step explained, tuned, one lever compared on this machine, and the page.

Without a GPU the step is one of an H200, whose trace and tuning ship with the package; with one it is traced and tuned here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.measured import MeasuredRun
from flopwise.api.bench import bench
from flopwise.api.doctor import doctor
from flopwise.api.explain import explain_one
from flopwise.api.profile import profile
from flopwise.api.report import report
from flopwise.api.tune import tune
from flopwise.capture.progress import Progress
from flopwise.errors import FlopwiseError
from flopwise.records.tuning import Tuning
from flopwise.store.tuning import read_tuning

SHIPPED = Path(__file__).parents[1] / "demo_data"
TRACE = SHIPPED / "h200-small-fp32-naive-2steps.kineto.json.gz"
TUNING = SHIPPED / "tuning"
# The step of both, as a beginner writes it.
STEP: dict[str, Any] = {"batch": 4, "context": 512, "attention": "naive", "norm": "eager", "activation": "eager"}
_BUDGET_S = 40.0


@dataclass(frozen=True)
class Title:
    """What the next part is about, and the command that shows it."""

    text: str
    command: str = ""


Part = Title | str | Explanation | HostExplanation | Tuning | MeasuredRun | Path


def demo(
    show: Callable[[Part], None],
    *,
    device: str = "auto",
    runs: str | Path | None = None,
    progress: Progress | None = None,
) -> None:
    """`show` gets each part; the last is the path of the page, or why there is none."""
    common: dict[str, Any] = {"runs": runs, "progress": progress, "command": "flopwise demo"}
    on_gpu = device != "cpu" and any(check.name == "device" and "cuda" in check.found for check in doctor())
    if on_gpu:
        show(Title("Why is this training step slow on your GPU?", "flopwise profile small …; flopwise explain last"))
        target: MeasuredRun | Path = profile("small", device=device, seconds=1.0, **STEP, **common)
    else:
        show(Title("Why is this training step slow? Its trace on an H200:", "flopwise explain TRACE"))
        target = TRACE
    show(explain_one(target))
    tuned = read_tuning(TUNING) if not on_gpu else _tuned_here(device, common)
    pages: list[MeasuredRun | Path | str] = [target, tuned.run if on_gpu else TUNING]
    where = ""
    if not tuned.kept:  # a host that starts processes slowly has tried nothing to its end
        show(f"In {_BUDGET_S:.0f} s nothing was tried to its end here: flopwise tune small --budget 300s")
        tuned, where = read_tuning(TUNING), " on an H200"
    took = f" in {tuned.ended.seconds:.0f} s" if tuned.ended is not None else ""
    faster = f"{tuned.times_faster:.1f} times as fast"
    show(Title(f"The same step, tuned{where}{took}: {faster}", "flopwise tune small …"))
    show(tuned)
    if not on_gpu:
        _compare(show, pages, device, common)
    show(_page(pages, runs))


def _compare(
    show: Callable[[Part], None], pages: list[MeasuredRun | Path | str], device: str, common: dict[str, Any]
) -> None:
    """One lever on this machine; a tuning on a GPU has compared several."""
    show(Title("One lever, measured here:", "flopwise bench tiny --versus attention=naive"))
    try:
        pages.append(bench("tiny", device=device, seconds=3.0, versus={"attention": "naive"}, **common))
        show(pages[-1])
    except FlopwiseError as error:
        show(f"not measured: {error.message} ({error.hint})")


def _tuned_here(device: str, common: dict[str, Any]) -> Tuning:
    return tune("small", device=device, budget=_BUDGET_S, seconds=1.0, **STEP, **common)


def _free(place: Path) -> Path:
    """A name that nothing has yet: nobody asked for a file of theirs to be replaced."""
    number = 1
    while (free := place.with_stem(f"{place.stem}-{number}") if number > 1 else place).exists() or free.is_symlink():
        number += 1
    return free


def _page(targets: list[MeasuredRun | Path | str], runs: str | Path | None) -> Path | str:
    """The page over all parts, in the current folder; or why there is none."""
    try:
        return report(*targets, output=_free(Path.cwd() / "report.html"), runs=runs, command="flopwise demo")
    except FlopwiseError as error:
        return f"no page: {error.message} ({error.hint})"
