"""How good the predictions are: what flopwise says before a step is run, beside what was measured.

    python benchmarks/prediction.py --memory-closed-form [RUN…]

The cases are not chosen: every point of the stored runs (all under benchmarks/results/h200-2026-11 unless runs are
named) that is a step of the reference model and has the allocator's figures is in the table, once. Peaks are
torch.cuda.max_memory_allocated() of a phase; the step's is the largest of its phases. `account` counts eager PyTorch,
so compiled steps and CUDA graphs are listed and judged apart.
"""

import argparse
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from flopwise import units
from flopwise.cost.step import account_step
from flopwise.records import Point
from flopwise.render.table import Column, Table, markdown
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.model import ModelSpec
from flopwise.store import StoredRun

RESULTS = Path(__file__).parent / "results" / "h200-2026-11"


def model_points(runs: Iterable[Path]) -> list[Point]:
    """Every measured step of the reference model, each workload once."""
    found: dict[str, Point] = {}
    for run in runs:
        for point in StoredRun.load(run).points:
            if point.memory and isinstance(point.trial.workload.subject, ModelSpec):
                found.setdefault(point.trial.workload.label(), point)
    return list(found.values())


def memory_closed_form(points: Sequence[Point]) -> list[Table]:
    """The closed form's peaks beside the measured ones."""
    eager = [p for p in points if p.trial.workload.recipe.compile == "off" and p.trial.workload.recipe.graph == "off"]
    others = [p for p in points if p not in eager]
    tables = [_memory_table("peak allocated memory, closed form, eager steps", eager)]
    if others:
        tables.append(_memory_table("the same for compiled steps and CUDA graphs, counted as if eager", others))
    return tables


def _memory_table(title: str, points: Sequence[Point]) -> Table:
    rows = [_memory_row(point) for point in points]
    errors = sorted(abs(row["error"]) for row in rows)
    columns = (
        Column("workload", "workload", right=False),
        Column("measured_bytes", "measured", units.size),
        Column("predicted_bytes", "predicted", units.size),
        Column("error", "error", lambda share: f"{100 * share:+.2f} %"),
        Column("phase", "worst phase", right=False),
        Column("phase_error", "its error", lambda share: f"{100 * share:+.2f} %"),
    )
    note = f"{len(rows)} steps: median error {units.percent(statistics.median(errors), 2)}, worst {units.percent(errors[-1], 2)}"
    return Table(title=title, columns=columns, rows=tuple(rows), notes=(note,))


def _memory_row(point: Point) -> dict[str, object]:
    told = account_step(point.trial.workload, _gpu(point))
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


def _gpu(point: Point) -> Gpu | None:
    there = point.environment.gpu if point.environment else None
    return find_gpu(there.name) if there else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", type=Path, help="stored runs; else all under benchmarks/results/h200-2026-11"
    )
    parser.add_argument("--memory-closed-form", action="store_true", help="peak memory by `flopwise account`")
    given = parser.parse_args()
    if not given.memory_closed_form:
        parser.error("nothing asked for: --memory-closed-form")
    points = model_points(given.runs or sorted(path.parent for path in RESULTS.glob("*/points.jsonl")))
    for table in memory_closed_form(points):
        print(markdown(table), "\n")


if __name__ == "__main__":
    main()
