"""Peak memory that the dry run predicts, without a GPU, against what the H200 measured.

    python benchmarks/dry_run_memory.py [--results benchmarks/results/h200-2026-11] [--full]

Every stored point that ran eagerly and whole is dry-run, once for each different workload: the step's largest
`max_memory_allocated` (and `memory_reserved`) beside the prediction. Points that went through torch.compile or a CUDA graph
are left out: the dry run tells their eager ops. `--full`: run every block of deep models, instead of five and copies.

`small`, `medium` and four shapes of op:attention (dim 16 and 128, contexts up to 4096) were looked at while the dry run was
written; all others are held back (but for one number of `2.7B`, its first phase's start, from which the allocator's rule
for blocks that are not cut was understood). While a single operation is measured, a buffer of four L2 caches flushes the cache
between samples; it is the benchmark's, so it is taken off the measured figure.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from flopwise.predict.dry import run as dry
from flopwise.records.run import OK, Point
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import Workload
from flopwise.version import __version__

RESULTS = Path(__file__).parent / "results" / "h200-2026-11"
FLUSH_L2_CACHES = 4


@dataclass(frozen=True)
class Case:
    """One workload, measured and predicted."""

    label: str
    held_back: bool
    measured_bytes: int
    predicted_bytes: int
    worst_phase: float  # the largest error of any phase's start, peak or end
    reserved: float | None  # its error; unknown of a single operation, whose flushing buffer may lie in reserved memory
    seconds: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def points(results: Path) -> Iterator[Point]:
    """Eager points with memory, each workload once."""
    seen = set()
    for path in sorted(results.glob("*/points.jsonl")):
        for line in path.read_text().splitlines():
            point = msgspec.json.decode(line, type=Point)
            recipe, label = point.trial.workload.recipe, point.trial.workload.label()
            if point.status == OK and point.memory and (recipe.compile, recipe.graph) == ("off", "off"):
                if label not in seen:
                    yield point
                seen.add(label)


def looked_at(workload: Workload) -> bool:
    if isinstance(workload.subject, OpSpec):
        return workload.subject.dims["dim"] in (16, 128) and workload.context in (256, 1024, 4096)
    return workload.target in ("small", "medium")


def case(point: Point) -> Case:
    workload = point.trial.workload
    begun = time.process_time()
    run = dry.dry_run(workload)
    seconds = time.process_time() - begun
    flush = 0
    if isinstance(workload.subject, OpSpec) and point.environment and point.environment.gpu:
        flush = FLUSH_L2_CACHES * point.environment.gpu.l2_bytes
    errors = [
        getattr(predicted, field) / (getattr(measured, field) - flush) - 1
        for measured, predicted in zip(point.memory, run.memory, strict=True)
        for field in ("start_bytes", "peak_bytes", "end_bytes")
    ]
    return Case(
        label=workload.label(),
        held_back=not looked_at(workload),
        measured_bytes=max(m.peak_bytes for m in point.memory) - flush,
        predicted_bytes=run.peak_bytes,
        reserved=None if flush else run.memory[-1].reserved_bytes / point.memory[-1].reserved_bytes - 1,
        worst_phase=max(errors, key=abs),
        seconds=seconds,
    )


def table(cases: list[Case]) -> str:
    lines = [
        "| workload | measured bytes | predicted − measured | peak | worst start, peak or end of a phase | reserved | CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for c in cases:
        off = f"{c.predicted_bytes - c.measured_bytes:+,}"
        shares = (c.error, c.worst_phase, c.reserved)
        lines.append(
            f"| {c.label} | {c.measured_bytes:,} | {off} | "
            + " | ".join("–" if e is None else f"{e:+.3%}" if e else "0" for e in shares)
            + f" | {c.seconds:.1f} |"
        )
    return "\n".join(lines)


def summary(cases: list[Case]) -> str:
    errors = [abs(c.error) for c in cases]
    exact = sum(c.predicted_bytes == c.measured_bytes for c in cases)
    return (
        f"{len(cases)} workloads: {exact} exact to the byte, median error {statistics.median(errors):.4%}, "
        f"worst {max(errors):.3%}; longest dry run {max(c.seconds for c in cases):.1f} CPU s"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--full", action="store_true")
    chosen = options.parse_args()
    if chosen.full:
        dry.shallow_depth = lambda layers, checkpoint: None
    measured = list(points(chosen.results))
    environment = next(p.environment for p in measured if p.environment)
    cases = [case(point) for point in measured]
    gpu = environment.gpu.name if environment.gpu else "?"
    print(f"Measured: {gpu}, torch {environment.torch}, Python {environment.python}.")
    print(
        f"Predicted: flopwise {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, no GPU used."
    )
    for title, held_back in (("Looked at while it was written", False), ("Held back", True)):
        chosen_cases = [c for c in cases if c.held_back == held_back]
        if not chosen_cases:
            continue
        print(f"\n## {title}\n\n{summary(chosen_cases)}\n\n{table(chosen_cases)}")


if __name__ == "__main__":
    main()
