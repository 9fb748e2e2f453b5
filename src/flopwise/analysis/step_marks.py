"""What in a trace may mark its steps: the profiler's marks, ranges, optimizers, data loaders, functions, calls of the model.

Every function here returns the marks of one kind, on the thread that launched most of the work; None where there are none.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times, covered_within
from flopwise.trace.phases import (
    FORWARD,
    is_iteration,
    is_optimizer_step,
    is_step,
    is_step_function,
    is_warm_up,
    phase_of_range,
)
from flopwise.trace.tables import ANNOTATION, MODULE, STEP, Trace
from flopwise.work.operation import OPTIMIZER

_LOADER = re.compile(r"^enumerate\(DataLoader\)#")
_COMPILED = re.compile(r"^## Call CompiledFxGraph |^Torch-Compiled Region")
_NO_STEP = re.compile(r"^(?:nccl:|c10d::|record_param_comms|enumerate\(DataLoader\)|PyTorch Profiler|Optimizer\.)")
_DIGITS = re.compile(r"\d+")
_UPDATE_ALONE = 0.05  # of what the longest step does: optimizers with less work between them step together
ALL = 0.99  # of the GPU time must be launched inside ranges that not even their name makes steps
_MOST_FAMILIES = 30  # names of ranges that are looked at, but for numbers


@dataclass(frozen=True)
class Marks:
    """Where steps begin and end on the host, by start, and the marks' names."""

    start: Times
    end: Times
    names: tuple[str, ...]
    closed: int | None = None  # when the last one's marks end, where that is before its end


def after_warm_up(trace: Trace, work: pl.DataFrame) -> tuple[Trace, pl.DataFrame] | None:
    """The trace and its work without what began in a range 'warm-up'; None where there is no such range, or nothing else."""
    start, end = (np.sort(_annotations(trace, is_warm_up)[name].to_numpy()) for name in ("start_ns", "end_ns"))
    if not len(start):
        return None

    def later(times: pl.Series) -> pl.Series:
        begun = times.to_numpy()
        return pl.Series(np.searchsorted(start, begun, "right") <= np.searchsorted(end, begun, "right"))

    kept = work.filter(later(work["launch_ns"].fill_null(work["start_ns"])))
    if not kept.height:
        return None
    spans = {name: getattr(trace, name) for name in ("ranges", "ops", "frames", "launches", "graph_launches")}
    return replace(trace, **{name: table.filter(later(table["start_ns"])) for name, table in spans.items()}), kept


def profiler_steps(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """`ProfilerStep#…`."""
    return _each(trace, trace.ranges.filter(pl.col("kind") == STEP), work)


def iterations(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """Those of a serving engine."""
    return _each(trace, _annotations(trace, is_iteration), work)


def named_steps(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """Ranges named as steps: 'step 3', 'train_step', Lightning's."""
    return _each(trace, _annotations(trace, is_step), work)


def forward_passes(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """From a forward pass to the next; to the next after an optimizer, where one lies after several."""
    phases = _annotations(trace, lambda name: phase_of_range(name) is not None)
    start, _, names = _outermost(trace, _of_one_thread(_annotations(trace, _is_forward), work))
    if not len(start):
        return None
    updated = np.sort(_update_times(trace, work))
    if len(updated):
        before = np.searchsorted(updated, start)
        first = np.concatenate(([True], before[1:] > before[:-1]))
        start, names = start[first], tuple(name for name, kept in zip(names, first, strict=True) if kept)
    return _until_next(trace, start, names, closed=int(phases["end_ns"].to_numpy().max()))


def updates(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """From the end of an optimizer's step to the end of the next; the first from the first event on that thread.

    Optimizers that step one after the other are one. Of several that alternate, each with a backward pass of its own, the
    rarest ends a step. Steps taken in gradient hooks are part of a backward pass, and end nothing.
    """
    start, end, names = _outermost(trace, _of_one_thread(_outside_backward(trace, _optimizer_steps(trace)), work))
    if not len(start):
        return None
    last = _last_of_each(work, end)
    if last is None:
        return None
    end, names = end[last], tuple(names[place] for place in last.tolist())
    often = Counter(names)
    rarest = min(often, key=lambda name: (often[name] < 2, often[name], -names[::-1].index(name)))
    kept = np.array([name == rarest for name in names])
    end = end[kept]
    begin = np.concatenate(([_first_event(trace)], end[:-1]))
    return Marks(begin, end, (rarest,) * len(end))


def fetched_batches(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """From a batch fetched from PyTorch's data loader to the next."""
    start, _, names = _outermost(trace, _of_one_thread(_spans(trace, lambda name: bool(_LOADER.match(name))), work))
    return _until_next(trace, start, names) if len(start) > 1 else None


def functions(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """Python functions named as steps, where stacks were captured."""
    named = _numbers(trace, is_step_function)
    start, _, names = _outermost(trace, _of_one_thread(trace.frames.filter(pl.col("name").is_in(named)), work))
    return _until_next(trace, start, names) if len(start) else None


def model_calls(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """Calls of the outermost module with most of the GPU time."""
    modules = trace.ranges.filter(pl.col("kind") == MODULE)
    if not modules.height:
        return None
    first = modules.filter(pl.col("thread") == modules["thread"][0])
    start, end, names = _outermost(trace, first)
    if len(start) < 2:
        return None
    spent = _launched_within(work, start, end)
    by_name: Counter[str] = Counter()
    for name, ns in zip(names, spent.tolist(), strict=True):
        by_name[name] += ns
    chosen = by_name.most_common(1)[0][0]
    mine = np.array([name == chosen for name in names])
    return _until_next(trace, start[mine], (chosen,) * int(mine.sum())) if int(mine.sum()) > 1 else None


def alike_ranges(trace: Trace, work: pl.DataFrame) -> Marks | None:
    """Ranges of one name, but for numbers, that follow one another and hold all of the work; the shortest such.

    An embedding and a head lie outside the ranges of layers, so that these do not hold it all.
    """
    ranges = _of_one_thread(trace.ranges.filter(pl.col("kind") == ANNOTATION), work)
    whole = _launched_within(work, np.array([0]), np.array([np.iinfo(np.int64).max]))[0]
    best: Marks | None = None
    for some in _families(trace, ranges):
        start, end, names = _outermost(trace, some)
        if len(start) < max(2, len(best.start) if best is not None else 0) or in_one_call(trace, start):
            continue
        if int(_launched_within(work, start, end).sum()) >= ALL * int(whole):
            best = Marks(start, end, names)
    return best


def _families(trace: Trace, ranges: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The ranges by name, numbers apart; those with most time first, and not too many."""
    numbers = [number for number in ranges["name"].unique().to_list() if _may_be_a_step(trace.names[number])]
    texts = [_DIGITS.sub("#", trace.names[number]) for number in numbers]
    named = pl.DataFrame({"name": numbers, "family": texts}, schema={"name": pl.UInt32, "family": pl.String})
    with_family = ranges.join(named, on="name")
    took = (pl.col("end_ns") - pl.col("start_ns")).sum()
    families = (
        with_family.group_by("family").agg(pl.len(), took.alias("ns")).sort("ns", "family", descending=[True, False])
    )
    for family in families.filter(pl.col("len") >= 2)["family"].head(_MOST_FAMILIES):
        yield with_family.filter(pl.col("family") == family)


def same_name(names: Sequence[str]) -> bool:
    """Whether names differ in numbers alone.

    >>> same_name(("step 1", "step 2")), same_name(("step 1", "epoch 1"))
    (True, False)
    """
    return len({_DIGITS.sub("#", name) for name in names}) == 1


def in_one_call(trace: Trace, starts: Times) -> bool:
    """Whether several of these lie in one call of a model or of a compiled graph: then they are its layers."""
    compiled = _numbers(trace, lambda name: bool(_COMPILED.match(name)))
    is_call = (pl.col("kind") == MODULE) | pl.col("name").is_in(compiled)
    columns = ["start_ns", "end_ns", "thread", "name"]
    tables = (trace.ranges.filter(is_call), trace.ops.filter(pl.col("name").is_in(compiled)))
    calls = pl.concat([table.select(columns) for table in tables])
    for _, some in calls.group_by("thread"):
        begin, end, _ = _outermost(trace, some)
        inside = np.searchsorted(np.sort(starts), end) - np.searchsorted(np.sort(starts), begin)
        if (inside > 1).any():
            return True
    return len(np.unique(starts)) < len(starts)  # of one CUDA graph's launch


def _may_be_a_step(name: str) -> bool:
    return phase_of_range(name) is None and _NO_STEP.match(name) is None


def _is_forward(name: str) -> bool:
    return phase_of_range(name) == FORWARD


def _numbers(trace: Trace, holds: Callable[[str], bool]) -> list[int]:
    return [number for number, name in enumerate(trace.names) if holds(name)]


def _annotations(trace: Trace, holds: Callable[[str], bool]) -> pl.DataFrame:
    return trace.ranges.filter(pl.col("kind") != MODULE, pl.col("name").is_in(_numbers(trace, holds)))


def _spans(trace: Trace, holds: Callable[[str], bool]) -> pl.DataFrame:
    """Annotations and ops: before 1.12, PyTorch wrote its own ranges among the ops."""
    columns, named = ["start_ns", "end_ns", "process", "thread", "name"], _numbers(trace, holds)
    return pl.concat([table.filter(pl.col("name").is_in(named)).select(columns) for table in (trace.ranges, trace.ops)])


def _each(trace: Trace, ranges: pl.DataFrame, work: pl.DataFrame) -> Marks | None:
    start, end, names = _outermost(trace, _of_one_thread(ranges, work))
    return Marks(start, end, names) if len(start) else None


def _until_next(trace: Trace, start: Times, names: tuple[str, ...], closed: int | None = None) -> Marks:
    """Each reaches to the next, the last one to the end of the trace."""
    tables = (trace.kernels, trace.copies, trace.graph_runs, trace.ranges, trace.ops)
    last = max((int(table["end_ns"].to_numpy().max()) for table in tables if table.height), default=0)
    return Marks(start, np.append(start[1:] - 1, last), names, last if closed is None else closed)


def _optimizer_steps(trace: Trace) -> pl.DataFrame:
    return _spans(trace, is_optimizer_step)


def _update_times(trace: Trace, work: pl.DataFrame) -> Times:
    """When the optimizer changed the parameters: by its ranges, else by its kernels."""
    ranges: Times = _annotations(trace, is_optimizer_step)["start_ns"].to_numpy()
    if len(ranges):
        return ranges
    updating = work.filter(pl.col("class") == OPTIMIZER)
    launched: Times = updating["launch_ns"].fill_null(updating["start_ns"]).to_numpy()
    return launched


def _outside_backward(trace: Trace, ranges: pl.DataFrame) -> pl.DataFrame:
    """Without the ranges that lie in a backward node of their thread."""
    kept = np.ones(ranges.height, dtype=bool)
    thread = ranges["thread"].to_numpy()
    start, end = (ranges[name].to_numpy() for name in ("start_ns", "end_ns"))
    for (number,), nodes in trace.ops.filter("backward").group_by("thread"):
        mine = thread == number
        around = covered_within(start[mine], end[mine], nodes["start_ns"].to_numpy(), nodes["end_ns"].to_numpy())
        kept[mine] = around < np.maximum(end[mine] - start[mine], 1)
    return ranges.filter(pl.Series(kept))


def _last_of_each(work: pl.DataFrame, end: Times) -> Times | None:
    """Of the optimizers that step one after the other, the last; None where no other work tells."""
    if "phase" in work.columns:
        work = work.filter(pl.col("phase") != OPTIMIZER)
    between = _launched_within(work, np.concatenate(([0], end[:-1])), end)
    if not between.any():
        return None
    begins = between >= _UPDATE_ALONE * between.max()
    return np.flatnonzero(np.append(begins[1:], True))


def _launched_within(work: pl.DataFrame, start: Times, end: Times) -> Times:
    """The GPU time launched within each span."""
    launched = work["launch_ns"].fill_null(work["start_ns"]).to_numpy()
    order = np.argsort(launched, kind="stable")
    spent = np.concatenate(([0], np.cumsum(work["duration_ns"].to_numpy()[order])))
    first, last = (np.searchsorted(launched[order], time, side="left") for time in (start, end))
    within: Times = spent[last] - spent[first]
    return within


def _first_event(trace: Trace) -> int:
    tables = (trace.ops, trace.launches, trace.graph_launches)
    return min((int(table["start_ns"].to_numpy().min()) for table in tables if table.height), default=0)


def _of_one_thread(ranges: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Of the threads that have such ranges, the one that launched most of the work; else the one with most of them."""
    threads = ranges.group_by("thread").len()
    if threads.height < 2:
        return ranges
    calls = work.group_by(pl.col("launch_thread").alias("thread")).agg(calls=pl.len())
    ranked = threads.join(calls, on="thread", how="left").sort("calls", "len", "thread", nulls_last=False)
    return ranges.filter(pl.col("thread") == ranked["thread"][-1])


def _outermost(trace: Trace, ranges: pl.DataFrame) -> tuple[Times, Times, tuple[str, ...]]:
    """Start, end and name of the ranges of one thread, by start; one that starts inside another is part of it."""
    ranges = ranges.sort("start_ns", "end_ns", descending=[False, True])
    start, end = (ranges[name].to_numpy() for name in ("start_ns", "end_ns"))
    alone = np.ones(len(start), dtype=bool)
    alone[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    names = tuple(trace.names[number] for number in ranges["name"].to_numpy()[alone].tolist())
    return start[alone], end[alone], names
