"""The story so far on this machine, in about a minute; no GPU needed."""

from collections.abc import Callable
from pathlib import Path

from flopwise.capture.doctor import Check
from flopwise.spec.sweep import sweep_from
from flopwise.store import StoredRun
from flopwise.verbs.bench import bench
from flopwise.verbs.compare import Compared, compare_within
from flopwise.verbs.doctor import doctor
from flopwise.verbs.progress import Progress
from flopwise.verbs.sweep import sweep

Part = str | list[Check] | StoredRun | Compared  # a title before each part


def demo(
    show: Callable[[Part], None],
    *,
    device: str = "auto",
    runs: str | Path | None = None,
    progress: Progress | None = None,
) -> StoredRun:
    """Look at the machine, time a step, try a lever in turns with the baseline, sweep a few sizes; `show` gets each part.

    On a GPU the model is `small`, on a CPU `tiny`.
    """
    show("1. What this machine can do (flopwise doctor)")
    checks = doctor()
    show(checks)
    on_gpu = device != "cpu" and any(check.name == "device" and "cuda" in check.found for check in checks)
    model = "small" if on_gpu else "tiny"
    common = {"runs": runs, "progress": progress, "device": device}
    show(f"2. Where the time of a training step goes (flopwise bench {model})")
    show(bench(model, seconds=3.0, command="flopwise demo", **common))  # type: ignore[arg-type]
    lever = {"graph": "on", "optimizer": "fused"} if on_gpu else {"attention": "naive"}
    words = ",".join(f"{name}={value}" for name, value in lever.items())
    show(f"3. Does a lever help? Both are measured in turns (flopwise bench {model} --versus {words})")
    both = bench(model, seconds=6.0, versus=lever, command="flopwise demo", **common)  # type: ignore[arg-type]
    show(both)
    compared = compare_within(both)
    if compared is not None:
        show(compared)
    table = {
        "name": "demo",
        "base": {"workload": model, "phase": "forward", "seconds": 1.0, "device": device},
        "group": {"sizes": {"context": [32, 64, 128], "attention": ["naive", "sdpa"]}},
    }
    show("4. How it scales with context (flopwise sweep FILE.toml)")
    swept = sweep(sweep_from(table), runs=runs, fresh=True, command="flopwise demo", progress=progress)
    show(swept)
    return swept
