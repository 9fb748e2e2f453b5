"""Where the time of a step went: from a run's own trace, or from a file someone else made."""

from dataclasses import dataclass
from pathlib import Path

from flopwise.analysis.explanation import Explanation, Kernel, explain_trace
from flopwise.errors import FlopwiseError
from flopwise.records import Point
from flopwise.store import StoredRun, find, runs_root
from flopwise.trace.read import is_trace_file, read_trace, unknown_suffix


def explain(
    target: str | Path | StoredRun,
    *,
    timings: str | Path | StoredRun | None = None,
    runs: str | Path | None = None,
) -> Explanation:
    """Explain a trace: a run that has one (`last`, an id, a tag, a path), or a Kineto or Nsight Systems file.

    `timings` is a run of the same workload without a profiler; a run of `profile` has its own.

    >>> flopwise.explain("trace.json.gz").verdict        # doctest: +SKIP
    'launch-bound: the GPU is idle 73% of the time: …'
    """
    path, point = trace_of(target, runs)
    if point is not None and point.ran is not None and point.ran.device == "cpu":
        raise FlopwiseError(
            f"the run {path.parents[1].name} was on the CPU: there is no GPU work in it to explain",
            "profile it on a GPU (--device cuda); of a CPU run, flopwise bench and runs show give the times by phase",
        )
    if timings is not None:
        timed = timings if isinstance(timings, StoredRun) else StoredRun.load(find(timings, runs_root(runs)))
        point = next((p for p in timed.points if p.phases), None)
        if point is None:
            raise FlopwiseError(f"the run {timed.header.id} has no samples", "give --timings a run of flopwise bench")
    return explain_trace(read_trace(path), point)


def trace_of(target: str | Path | StoredRun, runs: str | Path | None = None) -> tuple[Path, Point | None]:
    """The trace file that a target means, and the point it belongs to."""
    if not isinstance(target, StoredRun):
        path = Path(target).expanduser()
        if is_trace_file(path):
            return path, None
        target = run_named(target, runs)
    traced = next((point for point in target.points if point.trace_file), None)
    if traced is None:
        raise FlopwiseError(f"the run {target.header.id} has no trace", "capture one: flopwise profile WORKLOAD")
    return target.path / "traces" / traced.trace_file, traced


def run_named(target: str | Path, runs: str | Path | None = None) -> StoredRun:
    """The run that a target means; of a file that is none, its name is what is wrong."""
    try:
        path = find(target, runs_root(runs))
    except FlopwiseError:
        if Path(target).expanduser().is_file():
            raise unknown_suffix(Path(target)) from None
        raise
    return StoredRun.load(path)


@dataclass(frozen=True)
class Change:
    """One kernel in two traces, nanoseconds per step."""

    name: str
    kind: str
    before_ns: float
    after_ns: float
    before_count: float
    after_count: float

    @property
    def saved_ns(self) -> float:
        return self.before_ns - self.after_ns


def changes(before: Explanation, after: Explanation) -> list[Change]:
    """What changed from one trace to the other, kernel by kernel, the largest saving first."""
    old, new = ({kernel.name: kernel for kernel in e.kernels} for e in (before, after))
    found = []
    for name in dict.fromkeys((*old, *new)):
        a, b = old.get(name), new.get(name)
        known: Kernel | None = a or b
        found.append(
            Change(
                name=name,
                kind=known.kind if known else "",
                before_ns=a.gpu_ns if a else 0.0,
                after_ns=b.gpu_ns if b else 0.0,
                before_count=a.count if a else 0.0,
                after_count=b.count if b else 0.0,
            )
        )
    return sorted(found, key=lambda change: -change.saved_ns)
