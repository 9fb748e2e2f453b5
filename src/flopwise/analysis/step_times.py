"""Every step of a trace by itself: from when to when it kept the GPU, how long it took, and which steps are steady.

A host that runs ahead opens a step while the GPU still has the work of the one before: on the GPU, a step begins when that is
done. The steps follow one another without a gap, so that they add up to the whole.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise import units
from flopwise.analysis.gpu_gaps import LONGEST_PAUSE_NS, gpu_gaps, gpu_work
from flopwise.analysis.host_activity import allocations, compiling, module_loads, slow_launches, span_times
from flopwise.analysis.intervals import Times, covered_within
from flopwise.analysis.steps import UPDATES, Steps
from flopwise.trace.iterations import Batch
from flopwise.trace.phases import BACKWARD, FORWARD, PHASES
from flopwise.trace.tables import Trace

Floats = npt.NDArray[np.float64]
STEADY, COLD, PARTIAL = "steady", "cold", "partial"
# A cold step takes so many times the others' median; with one other step to compare it with, so many times that one.
COLD_RATIO, COLD_RATIO_OF_TWO = 1.5, 2.0
COLD_REASON = 0.1  # of what it takes beyond the others: what the host did at least as long explains it
PARTIAL_SHARE = 0.5  # of the median's launches: the trace began in the middle of the step
# An outlier is further from the median than so many deviations (of a normal distribution, by the median absolute one) and
# than this share of it.
OUTLIER_DEVIATIONS, OUTLIER_SHARE, FEWEST_FOR_OUTLIERS = 3.0, 0.1, 4
_TO_DEVIATION = 1.4826  # of a normal distribution, over the median absolute deviation
_FORWARD, _BACKWARD = PHASES.index(FORWARD), PHASES.index(BACKWARD)  # codes in a column of phases
_MOST_HIDDEN = 0.05  # of a step's work done before the GPU went on with what an earlier step had queued


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One step as it was traced."""

    number: int  # from 1
    name: str  # of its mark, '' without one
    start_ns: int  # since the trace began
    ns: int
    busy_ns: int  # at least one stream at work
    launches: int  # pieces of GPU work
    kind: str  # STEADY, COLD or PARTIAL: the figures are of the steady ones
    outlier: bool = False
    why: str = ""  # of a cold or partial step
    micro_batches: int = 0  # backward passes
    in_graphs: bool = False  # most of its GPU time was run by CUDA graphs
    batch: Batch | None = None  # of a serving engine's iteration: what it serves, where its range says so


class StepSpread(msgspec.Struct, frozen=True, kw_only=True):
    """The steady steps as they were traced."""

    steps: int
    median_ns: float
    low_ns: float  # the quartiles
    high_ns: float
    shortest_ns: int
    longest_ns: int
    outliers: tuple[int, ...] = ()  # numbers of the steps
    cold: tuple[int, ...] = ()  # set apart, partial ones included
    micro_batches: float = 0.0  # a step, on average; 0: no backward pass


def edges(steps: Steps, work: pl.DataFrame, launched: Times, trace: Trace, device: int) -> Times:
    """When each step begins on the GPU, and when the last one ends."""
    order = np.argsort(launched, kind="stable")
    when, number = launched[order], steps.of(launched)
    start = work["start_ns"].to_numpy()
    end = start + work["duration_ns"].to_numpy()
    opened = np.array(steps.starts_ns)
    reach = np.concatenate(([0], np.maximum.accumulate(end[order])))
    done = reach[np.searchsorted(when, opened, side="left")]
    first = np.full(len(steps), np.iinfo(np.int64).max)
    inside = number >= 0
    np.minimum.at(first, number[inside], start[inside])
    begin = np.minimum(first, np.maximum(opened, done))
    last = int(end[inside].max())
    if steps.marked_ns is None:
        begin[0] = first[0]
    else:
        last = max(last, steps.marked_ns[1])
    found = np.append(np.maximum.accumulate(begin), last)
    found[0] = _after_hidden_work(trace, device, int(found[0]), int(found[1]))
    return np.maximum.accumulate(found)


def _after_hidden_work(trace: Trace, device: int, low: int, high: int) -> int:
    """When the first step's own work began. A trace that was cut does not show the work that an earlier step had queued: the
    GPU then seems to do nothing, with work in its queue."""
    work = gpu_work(trace, device)
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    busy = int(covered_within(np.array([low]), np.array([high]), start, end)[0])
    between = gpu_gaps(trace, low, high, device)
    stops = between.end[(between.thread >= 0) & (between.queued > LONGEST_PAUSE_NS) & (between.end < high)]
    before = covered_within(np.full(len(stops), low), stops, start, end)
    early = stops[before <= _MOST_HIDDEN * busy]
    return int(early.max(initial=low))


def step_times(
    trace: Trace, steps: Steps, work: pl.DataFrame, launched: Times, at: Times, device: int
) -> tuple[StepTime, ...]:
    """All steps; `at` are their edges, `work` is what the device did for this process."""
    number = steps.of(launched)
    launches = np.bincount(number[number >= 0], minlength=len(steps))
    all_work = gpu_work(trace, device)
    busy = covered_within(at[:-1], at[1:], all_work["start_ns"].to_numpy(), all_work["end_ns"].to_numpy())
    took = np.diff(at)
    kinds = _kinds(trace, steps, took, launches)
    steady = np.array([kind == STEADY for kind, _ in kinds])
    far = _outliers(took, steady)
    passes = _backward_passes(work, launched, number, len(steps))
    spent, replayed = (_spent(some, number, len(steps)) for some in (work["duration_ns"], _replayed(work)))
    names = steps.names or ("",) * len(steps)
    return tuple(
        StepTime(
            number=place + 1,
            name=names[place],
            start_ns=int(at[place]),
            ns=int(took[place]),
            busy_ns=int(busy[place]),
            launches=int(launches[place]),
            kind=kind,
            outlier=bool(far[place]),
            why=why,
            micro_batches=int(passes[place]),
            in_graphs=bool(2 * replayed[place] > spent[place]),
        )
        for place, (kind, why) in enumerate(kinds)
    )


def _spent(durations: pl.Series, number: Times, n: int) -> Floats:
    """GPU time by step."""
    inside = number >= 0
    found: Floats = np.bincount(number[inside], weights=durations.to_numpy()[inside], minlength=n).astype(np.float64)
    return found


def _replayed(work: pl.DataFrame) -> pl.Series:
    """The durations of what CUDA graphs ran; of the rest 0."""
    return work.select(pl.when(pl.col("attributed") == "graph").then("duration_ns").otherwise(0)).to_series()


def steady_run(times: Sequence[StepTime]) -> tuple[int, int]:
    """The longest run of steady steps, of two the later: first, and one past the last. All steps, where none is steady."""
    best, first = (0, 0), 0
    for place in range(len(times) + 1):
        if place == len(times) or times[place].kind != STEADY:
            if place - first >= best[1] - best[0] and place > first:
                best = first, place
            first = place + 1
    return best if best[1] else (0, len(times))


def spread(times: Sequence[StepTime], run: tuple[int, int]) -> StepSpread:
    """Of the steps in the run that the figures are of."""
    chosen = times[run[0] : run[1]]
    took = np.array([one.ns for one in chosen])
    low, middle, high = np.quantile(took, (0.25, 0.5, 0.75)).tolist()
    return StepSpread(
        steps=len(chosen),
        median_ns=middle,
        low_ns=low,
        high_ns=high,
        shortest_ns=int(took.min()),
        longest_ns=int(took.max()),
        outliers=tuple(one.number for one in chosen if one.outlier),
        cold=tuple(one.number for one in times if one.kind != STEADY),
        micro_batches=float(np.mean([one.micro_batches for one in chosen])),
    )


def _kinds(trace: Trace, steps: Steps, took: Times, launches: Times) -> list[tuple[str, str]]:
    """Of each step its kind, and why it is set apart."""
    n = len(steps)
    if n < 2:
        return [(STEADY, "")] * n
    usual, ratio = (float(np.median(took)), COLD_RATIO) if n > 2 else (float(took.min()), COLD_RATIO_OF_TWO)
    reasons = _reasons(trace, steps, np.asarray(took - usual, dtype=np.float64), ratio)
    if n > 2:
        reasons[0] = reasons[0] or "the first step of the trace, much longer than the others"
    found = [(COLD, why) if why and ns > ratio * usual else (STEADY, "") for why, ns in zip(reasons, took, strict=True)]
    if steps.how == UPDATES and launches[0] < PARTIAL_SHARE * np.median(launches[1:]) and found[0][0] == STEADY:
        found[0] = PARTIAL, "the trace began in the middle of it"
    return found


def _reasons(trace: Trace, steps: Steps, beyond: Floats, ratio: float) -> list[str]:
    """What the host did in each step that it does not do in most, long enough to explain the time beyond the others'."""
    low, high = np.array(steps.starts_ns), np.append(np.array(steps.starts_ns[1:]), steps.end_ns)
    found = [""] * len(steps)
    for what, spans in (
        ("compiling", compiling(trace)),
        ("loading kernels", pl.concat([module_loads(trace), slow_launches(trace)])),
        ("", allocations(trace)),
    ):
        spent = covered_within(low, high, *span_times(spans))
        for place in np.flatnonzero((spent > 0) & (spent >= COLD_REASON * beyond) & (spent > ratio * np.median(spent))):
            inside = spans.filter(pl.col("start_ns").is_between(int(low[place]), int(high[place])))
            did = what or f"in {_longest(trace, inside)}"
            found[place] += f"{', ' if found[place] else ''}{units.duration(int(spent[place]))} {did}"
    return found


def _longest(trace: Trace, calls: pl.DataFrame) -> str:
    """The name of the calls that took most time together."""
    took = (pl.col("end_ns") - pl.col("start_ns")).sum()
    rows = calls.group_by("name").agg(took.alias("ns")).sort("ns", "name", descending=[True, False])
    return trace.names[rows["name"][0]] if rows.height else "the driver"


def _outliers(took: Times, steady: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Steady steps that are far from the others."""
    far = np.zeros(len(took), dtype=np.bool_)
    if int(steady.sum()) < FEWEST_FOR_OUTLIERS:
        return far
    middle = float(np.median(took[steady]))
    away = np.abs(took - middle)
    deviation = _TO_DEVIATION * float(np.median(away[steady]))
    far[steady] = away[steady] > max(OUTLIER_DEVIATIONS * deviation, OUTLIER_SHARE * middle)
    return far


def _backward_passes(work: pl.DataFrame, launched: Times, number: Times, n: int) -> Times:
    """How often backward work follows forward work in each step, in the order of the launches."""
    phase = work["phase"].to_physical().to_numpy()
    rows = np.flatnonzero((number >= 0) & ((phase == _FORWARD) | (phase == _BACKWARD)))
    rows = rows[np.argsort(launched[rows], kind="stable")]
    backward, step = phase[rows] == _BACKWARD, number[rows]
    begins = backward.copy()
    begins[1:] &= ~backward[:-1] | (step[1:] != step[:-1])
    return np.bincount(step[begins], minlength=n)
