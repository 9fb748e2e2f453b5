"""The part of a long trace that is explained: whole steps from its middle, as many as memory is meant for.

To explain a step, its ops, calls and kernels are needed at once, and a few hundred steps say as much as thousands do. A trace of
more rows than `MOST_ROWS` is cut, and a note says so. The memory that this leads to is in benchmarks/results/attack-2026-11.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records.note import Note
from flopwise.trace.columns import Flags, Ints, among
from flopwise.trace.phases import is_iteration, is_step
from flopwise.trace.spilled import GrowingTable, Rows, TooManyRows

MOST_ROWS = 5_500_000  # those of GPU work count several times
ON_GPU, GPU_ROWS = ("kernels", "copies"), 4
SAMPLES = 20_000  # starts that are looked at, of a table
_FEWEST_STEPS = 3  # that a window must hold to begin and end with steps
_OWN_MARKS = ("ProfilerStep#", "flopwise.step:")
_LAG = 8  # work that was launched in a window may begin until an eighth of it behind its end


@dataclass(frozen=True)
class Window:
    """A stretch of time, its end not included."""

    low_ns: int
    high_ns: int

    @property
    def last_work_ns(self) -> int:
        return self.high_ns + (self.high_ns - self.low_ns) // _LAG

    def spans(self, rows: Rows) -> Rows:
        """Those that begin in it, and its part of those around all of it."""
        start, end = rows["start_ns"], rows["end_ns"]
        around = (start < self.low_ns) & (end >= self.high_ns)
        chosen = around | ((start >= self.low_ns) & (start < self.high_ns))
        rows = rows | {"start_ns": np.where(around, self.low_ns, start), "end_ns": np.where(around, self.high_ns, end)}
        return {name: values[chosen] for name, values in rows.items()}

    def work(self, rows: Rows, launched: Ints) -> Rows:
        chosen = self.has_work(rows["start_ns"], rows["correlation"], launched)
        return {name: values[chosen] for name, values in rows.items()}

    def has_work(self, start: Ints, correlation: Ints, launched: Ints) -> Flags:
        """GPU work that begins in it, and what calls in it launched, which have these correlation ids."""
        chosen: Flags = (start >= self.low_ns) & (start < self.high_ns)
        late = np.flatnonzero((start >= self.high_ns) & (start < self.last_work_ns))
        chosen[late] = among(correlation[late], launched)
        return chosen

    def in_steps(self, begins: Ints) -> "Window":
        """From the first step that begins in it to where the last one does."""
        inside = np.unique(begins[(begins >= self.low_ns) & (begins < self.high_ns)])
        return Window(int(inside[0]), int(inside[-1])) if len(inside) > _FEWEST_STEPS else self


@dataclass(frozen=True)
class Cut:
    """What was kept of a trace."""

    window: Window
    share: float  # of its time
    notes: tuple[Note, ...]

    def of_times(self, table: pl.DataFrame) -> pl.DataFrame:
        """The rows of a table whose times begin with the window."""
        return table.filter(pl.col("start_ns").is_between(0, self.window.last_work_ns - self.window.low_ns))


def weight(tables: Mapping[str, GrowingTable]) -> int:
    """How much there is to hold and to explain, in rows of the host."""
    return sum(len(rows) * (GPU_ROWS if table in ON_GPU else 1) for table, rows in tables.items())


def cut(tables: Mapping[str, GrowingTable], names: Sequence[str], path: str) -> Cut:
    """Keep of every table what belongs to the middle of the trace; a note says how much that is."""
    found = len(tables["kernels"])
    window, whole_ns = _middle_of(tables)
    window = window.in_steps(step_begins(tables["annotations"].pieces("start_ns", "name"), names))
    try:
        for table in tables.keys() - ON_GPU:
            tables[table].keep(window.spans, MOST_ROWS)
        calls = [rows["correlation"] for rows in tables["calls"].pieces("correlation")]
        launched = np.concatenate([np.empty(0, np.int64), *calls])
        for table in ON_GPU:
            tables[table].keep(lambda rows: window.work(rows, launched), MOST_ROWS)
    except TooManyRows:
        raise too_many(path) from None
    return kept_part(window, whole_ns, len(tables["kernels"]), found)


def too_many(path: str) -> FlopwiseError:
    problem = f"{path} cannot be cut to a part that fits memory: too many events begin at almost one time"
    return FlopwiseError(problem, "no program does so: the file is damaged")


def kept_part(window: Window, whole_ns: int, kept: int, found: int) -> Cut:
    length = window.high_ns - window.low_ns
    share = min(1.0, length / max(whole_ns, 1))
    of_work = f"{kept:,} of {found:,} kernels, " if found else ""
    times = f"{units.duration(length)} from the middle of {units.duration(whole_ns)}"
    return Cut(window, share, (Note("window", f"a long trace: the figures are of {of_work}{times}"),))


def _middle_of(tables: Mapping[str, GrowingTable]) -> tuple[Window, int]:
    """The window that is to be kept, and from when to when the trace is."""
    sampled = []
    for table, rows in tables.items():
        if len(rows):
            each = -(-len(rows) // SAMPLES)
            starts = np.concatenate([piece["start_ns"][::each] for piece in rows.pieces("start_ns")])
            sampled.append((starts, weight({table: rows}) / len(starts)))
    whole_ns = max(int(starts.max()) for starts, _ in sampled) - min(int(starts.min()) for starts, _ in sampled)
    return middle(sampled, MOST_ROWS / weight(tables)), whole_ns


def middle(sampled: Sequence[tuple[Ints, float]], share: float) -> Window:
    """The stretch that holds this share of all rows, as many before it as behind it; of a sample of each table's starts, each
    of which stands for so many rows.

    >>> middle([(np.arange(100), 1.0)], 0.5)
    Window(low_ns=24, high_ns=74)
    """
    starts = np.concatenate([some for some, _ in sampled])
    weights = np.concatenate([np.full(len(some), each) for some, each in sampled])
    order = np.argsort(starts, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    at = np.searchsorted(reached, [0.5 - share / 2, 0.5 + share / 2]).clip(max=len(order) - 1)
    low, high = starts[order[at]].tolist()
    return Window(low, max(high, low + 1))


def step_begins(ranges: Iterable[Rows], names: Sequence[str]) -> Ints:
    """When the steps begin that ranges mark; by the profilers' own marks where there are any."""
    marks = np.fromiter((is_step(name) or is_iteration(name) for name in names), dtype=bool, count=len(names))
    own = np.fromiter((name.startswith(_OWN_MARKS) for name in names), dtype=bool, count=len(names))
    begins, own_begins = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rows in ranges:
        begins.append(rows["start_ns"][marks[rows["name"]]])
        own_begins.append(rows["start_ns"][own[rows["name"]]])
    found = np.concatenate(own_begins)
    return found if len(found) else np.concatenate(begins)
