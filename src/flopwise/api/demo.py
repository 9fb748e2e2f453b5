"""The story so far on this machine, in about a minute; no GPU needed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.matching import Compared, compare_within
from flopwise.analysis.measured import MeasuredRun
from flopwise.api.account import account
from flopwise.api.bench import bench
from flopwise.api.doctor import doctor
from flopwise.api.explain import explain
from flopwise.api.memory import memory
from flopwise.api.profile import profile
from flopwise.api.report import report
from flopwise.api.sweep import sweep
from flopwise.capture.doctor import Check
from flopwise.capture.progress import Progress
from flopwise.errors import FlopwiseError
from flopwise.predict.account import Account
from flopwise.snapshot.answers import MemoryReport
from flopwise.spec.sweep import sweep_from


@dataclass(frozen=True)
class Title:
    """What the next parts are about."""

    text: str


Part = (
    Title | str | list[Check] | MeasuredRun | Compared | Explanation | HostExplanation | MemoryReport | Account | Path
)


def demo(
    show: Callable[[Part], None],
    *,
    device: str = "auto",
    runs: str | Path | None = None,
    progress: Progress | None = None,
) -> MeasuredRun:
    """Look at the machine, time a step, try a lever against the baseline, sweep a few sizes, profile a step and
    explain it, say who holds its memory, and what it should have cost; the last part is the path of a page with all of it.

    `show` gets each part. On a GPU the model is `small`, on a CPU `tiny`.
    """
    show(Title("1. What this machine can do (flopwise doctor)"))
    checks = doctor()
    show(checks)
    on_gpu = device != "cpu" and any(check.name == "device" and "cuda" in check.found for check in checks)
    model = "small" if on_gpu else "tiny"
    common = {"runs": runs, "progress": progress, "device": device}
    show(Title(f"2. Where the time of a training step goes (flopwise bench {model})"))
    timed = bench(model, seconds=3.0, command="flopwise demo", **common)  # type: ignore[arg-type]
    show(timed)
    lever = {"graph": "on", "optimizer": "fused"} if on_gpu else {"attention": "naive"}
    words = ",".join(f"{name}={value}" for name, value in lever.items())
    show(Title(f"3. Does a lever help? Both are measured beside each other (flopwise bench {model} --versus {words})"))
    both = bench(model, seconds=6.0, versus=lever, command="flopwise demo", **common)  # type: ignore[arg-type]
    show(both)
    compared = compare_within(both.points)
    if compared is not None:
        show(compared)
    table = {
        "name": "demo",
        "base": {"workload": model, "phase": "forward", "seconds": 1.0, "device": device},
        "group": {"sizes": {"context": [32, 64, 128], "attention": ["naive", "sdpa"]}},
    }
    show(Title("4. How it scales with context (flopwise sweep FILE.toml)"))
    swept = sweep(sweep_from(table), runs=runs, fresh=True, command="flopwise demo", progress=progress)
    show(swept)
    show(Title(f"5. Why it takes that long (flopwise profile {model}; flopwise explain last)"))
    profiled = profile(model, seconds=1.0, command="flopwise demo", **common)  # type: ignore[arg-type]
    show(profiled)
    if profiled.points[0].trace_file:
        show(explain(profiled))
    show(Title(f"6. Who holds the memory, and what was predicted (flopwise memory {model})"))
    show(memory(model, steps=1, command="flopwise demo", **common))  # type: ignore[arg-type]
    show(Title("7. What a larger step must cost, before it is run (flopwise account small --gpu h100,h200)"))
    show(account("small", gpu="h100,h200", batch=4, context=512, precision="bf16"))
    show(Title("8. All of it on one page (flopwise report)"))
    show(_page((profiled, both, swept, timed, "last"), runs))  # the last run is memory's
    return profiled


def _free(place: Path) -> Path:
    """A name that nothing has yet: nobody asked for a file of theirs to be replaced."""
    number = 1
    while (free := place.with_stem(f"{place.stem}-{number}") if number > 1 else place).exists() or free.is_symlink():
        number += 1
    return free


def _page(targets: tuple[MeasuredRun | str, ...], runs: str | Path | None) -> Path | str:
    """The page over the runs, in the current folder; or why there is none."""
    try:
        return report(*targets, output=_free(Path.cwd() / "report.html"), runs=runs, command="flopwise demo")
    except FlopwiseError as error:
        return f"no page: {error.message} ({error.hint})"
