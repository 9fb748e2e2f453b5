"""The ranks that share a measured step, in a line or two."""

from collections.abc import Callable, Sequence
from statistics import median

from flopwise import units
from flopwise.records.run import Point, RankRow


def ranks_line(point: Point) -> str:
    """How far their steps and their memory are apart; '' of a step of one process.

    >>> from flopwise.spec.workload import Sampling, Trial, workload
    >>> trial = Trial(workload=workload("tiny", parallel="ddp", ranks=2), sampling=Sampling())
    >>> rows = tuple(RankRow(rank=n, device=f"cuda:{n}", wall_ns=(2_000_000 + n,)) for n in range(2))
    >>> ranks_line(Point(key=trial.key(), trial=trial, status="ok", ranks=rows))
    '2 ranks on 2 devices; medians of each 2.00 ms, and a step ends with its last rank'
    """
    if not point.ranks:
        return ""
    steps = [median(row.wall_ns) for row in point.ranks if row.wall_ns]
    peaks = [_peak(row) for row in point.ranks if row.memory]
    devices = len({row.device for row in point.ranks})
    words = [f"{len(point.ranks)} ranks on {devices} {'device' if devices == 1 else 'devices'}"]
    words += [f"medians of each {_span(steps, units.duration)}, and a step ends with its last rank"] if steps else []
    words += [f"peak memory of each {_span(peaks, units.size)}"] if peaks else []
    return "; ".join(words)


def update_line(point: Point) -> str:
    """Memory of a rank after building, and before, in and after the optimizer's step: what a sharded one changes."""
    update = [m for row in point.ranks for m in row.memory if m.phase == "optimizer"]
    built = [row.built_bytes for row in point.ranks if row.built_bytes]
    if not update:
        return ""
    moments = {
        "before the optimizer's step": [m.start_bytes for m in update],
        "in it at most": [m.peak_bytes for m in update],
        "after it": [m.end_bytes for m in update],
    }
    if built:
        moments = {"after building": built} | moments
    return "of each rank: " + ", ".join(f"{name} {_span(sizes, units.size)}" for name, sizes in moments.items())


def _peak(row: RankRow) -> int:
    return max(m.peak_bytes for m in row.memory)


def _span(values: Sequence[float], shown: Callable[[float], str]) -> str:
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"
