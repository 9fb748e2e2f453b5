"""How good the predictions are: what flopwise says before a step is run, beside what was measured.

    python benchmarks/prediction.py --memory [RUN…]
    python benchmarks/prediction.py --time [RUN…]

The cases are not chosen: every point of the stored runs (all under benchmarks/results/h200-2026-11 unless runs are
named) that is a step of the reference model and has the allocator's figures is in the table, once. Peaks are
torch.cuda.max_memory_allocated() of a phase; the step's is the largest of its phases. `account` counts eager PyTorch,
so compiled steps and CUDA graphs are listed and judged apart. Times are medians; 'launched in' is the least and the
most of the same step's samples until the host had queued everything; 'GPU' is the kernels' time alone where the GPU could be
held until all was queued, an upper limit otherwise.
"""

import argparse
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flopwise import units
from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.machine import Machine, find_ceilings
from flopwise.predict.prediction import predict
from flopwise.records.run import Point
from flopwise.records.table import Table
from flopwise.render.table import columns, markdown
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.model import ModelSpec
from flopwise.store import StoredRun

RESULTS = Path(__file__).parent / "results" / "h200-2026-11"


def measured(runs: Iterable[Path], models_alone: bool) -> list[Point]:
    """Every measured step, each workload once."""
    found: dict[str, Point] = {}
    for run in runs:
        for point in StoredRun.load(run).points:
            if point.memory and (isinstance(point.trial.workload.subject, ModelSpec) or not models_alone):
                found.setdefault(point.trial.workload.label(), point)
    return list(found.values())


def memory_peaks(points: Sequence[Point]) -> list[Table]:
    """The predicted peaks beside the measured ones."""
    eager = [p for p in points if p.trial.workload.recipe.compile == "off" and p.trial.workload.recipe.graph == "off"]
    others = [p for p in points if p not in eager]
    tables = [_memory_table("peak allocated memory, predicted from shapes, eager steps", eager)]
    if others:
        tables.append(_memory_table("the same for compiled steps and CUDA graphs, counted as if eager", others))
    return tables


def _memory_table(title: str, points: Sequence[Point]) -> Table:
    rows = [_memory_row(point) for point in points]
    errors = sorted(abs(row["error"]) for row in rows)
    fine = {key: {row[key]: f"{100 * row[key]:+.2f} %" for row in rows} for key in ("error", "phase_error")}
    heading = "workload | measured_bytes | predicted_bytes | error | phase: worst phase | phase_error: its error"
    note = f"{len(rows)} steps: median error {units.percent(statistics.median(errors), 2)}, worst {units.percent(errors[-1], 2)}"
    return Table("memory", title, columns(heading, labels=fine), tuple(rows), (note,))


def _memory_row(point: Point) -> dict[str, object]:
    told = predict(point.trial.workload, Machine(gpu=_gpu(point))).step
    peaks = {phase.phase: phase.peak_bytes for phase in told.phases}
    errors = {m.phase: peaks[m.phase] / m.peak_bytes - 1 for m in point.memory if m.phase in peaks}
    worst = max(errors, key=lambda phase: abs(errors[phase]), default="")
    measured = max(m.peak_bytes for m in point.memory)
    return {
        "workload": point.trial.workload.label(),
        "measured_bytes": measured,
        "predicted_bytes": told.peak_bytes,
        "error": told.peak_bytes / measured - 1,
        "phase": worst,
        "phase_error": errors.get(worst),
    }


def step_times(points: Sequence[Point]) -> Table:
    """Predicted beside measured step times: from ceilings measured on the GPU where they are kept, and by its datasheet."""
    rows = [row for point in points if (row := _time_row(point))]
    heading = (
        "workload | wall_ns: measured | launched: launched in | predicted_ns | error [signed_share] | "
        "specified_error: by datasheet [signed_share] | gpu_ns: GPU measured | predicted_gpu_ns: GPU predicted | "
        "gpu_error: error [signed_share] | specified_gpu_error: by datasheet [signed_share] | bound: bound by"
    )
    groups = (
        ("step time", "error", rows),
        (
            "step time where the GPU was busy for 90 % of it",
            "error",
            [r for r in rows if r["gpu_ns"] > 0.9 * r["wall_ns"]],
        ),
        (
            "step time where the GPU waited for launches",
            "error",
            [r for r in rows if r["gpu_ns"] <= 0.9 * r["wall_ns"]],
        ),
        ("GPU time, where it was held until all was queued", "gpu_error", [r for r in rows if r["held"]]),
    )
    notes = [
        f"{title}, {len(some)} steps: {_errors(some, key)}; by the datasheet {_errors(some, f'specified_{key}')}"
        for title, key, some in groups
        if some
    ]
    how = " and ".join(sorted({row["how"] for row in rows}))
    return Table("steps", f"step time, ceilings {how}", columns(heading), tuple(rows), tuple(notes))


def _errors(rows: Sequence[dict[str, Any]], key: str) -> str:
    errors = [abs(row[key]) for row in rows]
    return f"median error {units.percent(statistics.median(errors))}, worst {units.percent(max(errors))}"


def _time_row(point: Point) -> dict[str, Any] | None:
    there, times, w = _gpu(point), point.times(), point.trial.workload
    limits = find_ceilings(there) if there else None
    if there is None or limits is None or times is None or not times.gpu_ns:
        return None
    step = predict(w, Machine(gpu=there))
    told, specified = step.time_with(limits), step.time_with(from_datasheet(there))
    wall_ns, gpu_ns = statistics.median(times.wall_ns), statistics.median(times.gpu_ns)
    return {
        "workload": w.label(), "wall_ns": wall_ns, "predicted_ns": told.wall_ns, "error": told.wall_ns / wall_ns - 1,
        "gpu_ns": gpu_ns, "predicted_gpu_ns": told.gpu_ns, "gpu_error": told.gpu_ns / gpu_ns - 1, "bound": told.bound,
        "specified_error": specified.wall_ns / wall_ns - 1, "specified_gpu_error": specified.gpu_ns / gpu_ns - 1,
        "launched": f"{units.duration(min(times.launch_ns))} – {units.duration(max(times.launch_ns))}",
        "how": told.how, "held": bool(times.gpu_held) and all(times.gpu_held),
    }  # fmt: skip


def _gpu(point: Point) -> Gpu | None:
    there = point.environment.gpu if point.environment else None
    return find_gpu(there.name) if there else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", type=Path, help="stored runs; else all under benchmarks/results/h200-2026-11"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory by `flopwise account`")
    parser.add_argument("--time", action="store_true", help="step times by `flopwise account`")
    given = parser.parse_args()
    if not given.memory and not given.time:
        parser.error("nothing asked for: --memory, --time")
    runs = given.runs or sorted(path.parent for path in RESULTS.glob("*/points.jsonl"))
    tables = memory_peaks(measured(runs, models_alone=True)) if given.memory else []
    tables += [step_times(measured(runs, models_alone=False))] if given.time else []
    for table in tables:
        print(markdown(table), "\n")


if __name__ == "__main__":
    main()
