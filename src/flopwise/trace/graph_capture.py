"""Replayed CUDA graphs joined with where their nodes were captured: the trace of the capture, this trace's own, or kernels of
the same names in the same order that were launched one by one.

A profiler that records the replay of a graph (`cudaGraphLaunch`) knows nothing of the program that made its nodes; one that
records the capture sees every launch with its op and module, but no kernel runs. The k-th node is the same in both. The profiler
of AMD's GPUs writes the kernels' names at their launch: then names must agree, and nodes that differ are left out. Otherwise
only a capture with as many nodes as the replay has kernels and copies is taken.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from flopwise.errors import FlopwiseError
from flopwise.trace.call_names import puts_work
from flopwise.trace.kineto_stream import FileBytes
from flopwise.trace.nesting import Ints
from flopwise.trace.phases import is_capture_range, is_iteration, is_step
from flopwise.trace.tables import GRAPH_NODES, STEP, Trace
from flopwise.work.demangle import demangled_names

CAPTURE, NAMES = "capture", "names"  # how replays were joined
_COPY, _UNKNOWN = "(copy)", ""
_LEAST = 0.5  # of a replay's nodes have to be found, or it is another graph's
_MOST_PAIRS = 4_000_000  # of equal names, from which the order is found
_MOST_SINGLE = 20_000  # kernels launched singly that replays are compared with
_LARGEST_BYTES = 1 << 30  # of a capture's file, unpacked
_BEGINS, _ENDS = "StreamBeginCapture", "StreamEndCapture"
_MOST_FILES = 6  # that are looked into for a capture nobody named
_NUMBER = re.compile(r"\d+")
_FIRST_NODE = 1 << 40  # numbers of nodes from here on are ours
_MOST_REPLAYS = 20_000  # that are looked at: each takes a third of a millisecond


@dataclass(frozen=True)
class Joined:
    """A trace whose replays know their origin, and the share of the replayed GPU time that does."""

    trace: Trace
    how: str  # CAPTURE, NAMES, or '' where nothing was joined
    share: float


@dataclass(frozen=True)
class _Sequence:
    """Nodes in order: what each is called, and where the program was."""

    names: tuple[str, ...]
    thread: Ints
    time: Ints


def join_replays(trace: Trace, capture: Trace | None = None) -> Joined:
    """The trace with the origin of its replayed kernels: from `capture`, from its own captures, or by the order of names."""
    replays = list(islice(_replays(trace), _MOST_REPLAYS))
    if not replays:
        return Joined(trace, "", 0.0)
    if capture is not None:
        merged = _merged(trace, capture)
        host = _host_of(trace)
        return _joined(merged, replays, _captures(capture, -_shift(capture)), host, CAPTURE)
    if own := list(_captures(trace, 0)):
        return _joined(trace, replays, own, None, CAPTURE)
    return _joined(trace, replays, _launched_singly(trace), None, NAMES)


def replays_unknown(trace: Trace) -> bool:
    """Whether the trace replays CUDA graphs whose capture it does not hold."""
    return not trace.captured.height and next(_replays(trace), None) is not None


def _joined(
    trace: Trace,
    replays: Sequence[tuple[Ints, Ints, tuple[str, ...]]],
    known: Sequence[_Sequence],
    host: int | None,
    how: str,
) -> Joined:
    kernel_node, copy_node = (table["graph_node"].to_numpy().copy() for table in (trace.kernels, trace.copies))
    cache: dict[tuple[str, ...], tuple[int, Ints] | None] = {}
    rows: dict[str, list[Ints]] = {name: [] for name in ("start_ns", "process", "thread", "graph_node")}
    spent = found_ns = 0
    number = _FIRST_NODE
    for kernels, copies, names in replays:
        if names not in cache:
            cache[names] = _best(names, known)
        durations = np.concatenate([_durations(trace.kernels, kernels), _durations(trace.copies, copies)])
        spent += int(durations.sum())
        if (best := cache[names]) is None:
            continue
        which, place = best
        order = _in_order(trace, kernels, copies)
        placed = np.empty(len(order), dtype=np.int64)
        placed[order] = place
        found_ns += int(durations[placed >= 0].sum())
        nodes = np.where(placed >= 0, number + np.arange(len(placed)), -1)
        number += len(placed)
        kernel_node[kernels] = np.where(placed[: len(kernels)] >= 0, nodes[: len(kernels)], kernel_node[kernels])
        copy_node[copies] = np.where(placed[len(kernels) :] >= 0, nodes[len(kernels) :], copy_node[copies])
        hit = placed >= 0
        rows["start_ns"].append(known[which].time[placed[hit]])
        rows["thread"].append(known[which].thread[placed[hit]])
        rows["graph_node"].append(nodes[hit])
        process = np.concatenate(
            [trace.kernels["process"].to_numpy()[kernels], trace.copies["process"].to_numpy()[copies]]
        )
        rows["process"].append(process[hit])
    if not found_ns:
        return Joined(trace, "", 0.0)
    made = pl.DataFrame({name: np.concatenate(parts) for name, parts in rows.items()})
    made = made.with_columns(host=pl.col("process") if host is None else pl.lit(host, pl.Int64)).select(
        list(GRAPH_NODES)
    )
    joined = replace(
        trace,
        kernels=trace.kernels.with_columns(graph_node=pl.Series(kernel_node)),
        copies=trace.copies.with_columns(graph_node=pl.Series(copy_node)),
        graph_nodes=pl.concat([trace.graph_nodes, made.cast(GRAPH_NODES)]).sort("start_ns"),  # type: ignore[arg-type]
    )
    return Joined(joined, how, found_ns / max(spent, 1))


def _replays(trace: Trace) -> Iterator[tuple[Ints, Ints, tuple[str, ...]]]:
    """Of each launch of a graph whose nodes' captures are not known: rows of kernels and of copies, and their names in order."""
    if not trace.graph_launches.height:
        return
    known = set(trace.graph_nodes["graph_node"].to_list())
    kernels, copies = (_by_launch(trace, table, known) for table in (trace.kernels, trace.copies))
    none = np.empty(0, dtype=np.int64)
    for launch in kernels.keys() | copies.keys():
        mine, moved = kernels.get(launch, none), copies.get(launch, none)
        names = [*(trace.names[i] for i in trace.kernels["name"].to_numpy()[mine].tolist()), *[_COPY] * len(moved)]
        yield mine, moved, tuple(names[i] for i in _in_order(trace, mine, moved).tolist())


def _by_launch(trace: Trace, table: pl.DataFrame, known: set[int]) -> dict[tuple[int, int], Ints]:
    launches = trace.graph_launches.select("process", "correlation").unique()
    rows = table.select("process", "correlation", "graph_node").with_row_index("row")
    rows = rows.filter(~pl.col("graph_node").is_in(list(known)) if known else pl.lit(True))
    mine = rows.join(launches, on=["process", "correlation"], how="inner", maintain_order="left")
    groups = mine.group_by("process", "correlation", maintain_order=True).agg("row")
    return {(process, launch): np.array(some, dtype=np.int64) for process, launch, some in groups.iter_rows()}


def _in_order(trace: Trace, kernels: Ints, copies: Ints) -> Ints:
    """Positions among kernels and then copies, by start."""
    starts = (trace.kernels["start_ns"].to_numpy()[kernels], trace.copies["start_ns"].to_numpy()[copies])
    return np.argsort(np.concatenate(starts), kind="stable")


def _durations(table: pl.DataFrame, rows: Ints) -> Ints:
    spans: Ints = table["end_ns"].to_numpy()[rows] - table["start_ns"].to_numpy()[rows]
    return spans


def _best(names: tuple[str, ...], known: Sequence[_Sequence]) -> tuple[int, Ints] | None:
    """The sequence that agrees best with a replay, and of each of its nodes the place in it (-1: not there)."""
    best: tuple[int, Ints] | None = None
    for which, sequence in enumerate(known):
        place = _places(names, sequence.names)
        if best is None or (place >= 0).sum() > (best[1] >= 0).sum():
            best = which, place
    return best if best is not None and (best[1] >= 0).sum() >= _LEAST * len(names) else None


def _places(names: tuple[str, ...], known: tuple[str, ...]) -> Ints:
    """
    >>> _places(("a", "b", "c"), ("", "", "")), _places(("a", "c"), ("a", "b", "c")), _places(("a",), ("", ""))
    (array([0, 1, 2]), array([0, 2]), array([-1]))
    """
    alike = [
        one in (name, _UNKNOWN) and (one != _UNKNOWN or name != _COPY) for name, one in zip(names, known, strict=False)
    ]
    place = np.full(len(names), -1, dtype=np.int64)
    if len(names) == len(known) and sum(alike) >= _LEAST * len(names):
        return np.where(alike, np.arange(len(names)), -1)
    often = Counter(known)
    if _UNKNOWN in often or sum(often[name] for name in names) > _MOST_PAIRS:
        return place
    for block in SequenceMatcher(None, names, known, autojunk=False).get_matching_blocks():
        place[block.a : block.a + block.size] = np.arange(block.b, block.b + block.size)
    return place


def _captures(trace: Trace, shift: int) -> list[_Sequence]:
    """The nodes of each capture of a trace; `shift` is added to their times."""
    names, found = _captured_names(trace), []
    begins = trace.calls.filter(pl.col("name").is_in([i for i, n in enumerate(trace.names) if _BEGINS in n]))
    time, thread = (trace.captured[name].to_numpy() for name in ("start_ns", "thread"))
    which = np.searchsorted(np.sort(begins["start_ns"].to_numpy()), time)
    for number in np.unique(which):
        mine = np.flatnonzero(which == number)
        found.append(_Sequence(tuple(names[i] for i in mine.tolist()), thread[mine], time[mine] + shift))
    return found


def _captured_names(trace: Trace) -> list[str]:
    """What each captured call put into the graph; the kernels' names where the file has them."""
    calls = [trace.names[number] for number in trace.captured["name"].to_list()]
    told = [_COPY if "Mem" in call else _UNKNOWN for call in calls]
    given = _kernel_arguments(Path(trace.path)) if trace.source == "kineto" else []
    if len(given) != len(calls):
        return told
    return [copy or name for copy, name in zip(told, demangled_names(given), strict=True)]


class _Arguments(msgspec.Struct):
    kernel: str = ""


class _Call(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    args: _Arguments = msgspec.field(default_factory=_Arguments)


class _Calls(msgspec.Struct):
    traceEvents: list[_Call] = []  # noqa: N815


def _kernel_arguments(path: Path) -> list[str]:
    """The argument `kernel` of every call within a capture, by time; nothing where the file is too large or otherwise written."""
    parts: list[bytes] = []
    try:
        file = FileBytes(path)
        try:
            while part := file.read(1 << 24):
                parts.append(part)
                if file.total > _LARGEST_BYTES:
                    return []
        finally:
            file.close()
        calls = msgspec.json.decode(b"".join(parts), type=_Calls).traceEvents
    except (FlopwiseError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    calls = sorted((one for one in calls if one.cat in ("cuda_runtime", "cuda_driver")), key=lambda one: one.ts)
    found, opened = [], 0
    for one in calls:
        opened += (_BEGINS in one.name) - (_ENDS in one.name)
        if opened > 0 and puts_work(one.name):
            found.append(one.args.kernel)
    return found


def _launched_singly(trace: Trace) -> list[_Sequence]:
    """The kernels that were launched one by one, in the order of their launches: perhaps the same model without graphs."""
    calls = trace.launches.select("process", "correlation", "thread", at="start_ns")
    rows = trace.kernels.select("process", "correlation", "name").join(calls, on=["process", "correlation"]).sort("at")
    rows = rows.head(_MOST_SINGLE)
    names = tuple(trace.names[number] for number in rows["name"].to_list())
    return [_Sequence(names, rows["thread"].to_numpy(), rows["at"].to_numpy())] if names else []


def _shift(capture: Trace) -> int:
    """How long the capture's trace is: with so much taken off, its times are before the other's."""
    ends = [
        int(table["end_ns"].to_numpy().max())
        for table in (capture.ops, capture.ranges, capture.captured)
        if table.height
    ]
    return max(ends, default=0) + 1


def _host_of(trace: Trace) -> int:
    """A number for the process of the capture that no process of the trace has."""
    tables = (trace.kernels, trace.launches, trace.ops, trace.ranges)
    return max((int(table["process"].to_numpy().max()) for table in tables if table.height), default=0) + 1


def _merged(trace: Trace, capture: Trace) -> Trace:
    """The trace with the capture's ops, modules and annotations, as those of another process in the time before it."""
    offset, shift, host = len(trace.names), _shift(capture), _host_of(trace)
    marks = [i for i, name in enumerate(capture.names) if is_step(name) or is_iteration(name) or is_capture_range(name)]
    ranges = capture.ranges.filter((pl.col("kind") != STEP) & ~pl.col("name").is_in(marks))

    def moved(table: pl.DataFrame) -> pl.DataFrame:
        times = pl.col("start_ns", "end_ns") - shift
        return table.with_columns(times, pl.col("name") + offset, process=pl.lit(host, pl.Int64)).select(table.columns)

    def numbered(own: pl.DataFrame, other: pl.DataFrame, texts: str) -> pl.DataFrame:
        later = pl.col("op") + capture.ops.height
        place = own.columns[1]
        further = pl.col(place) + len(getattr(trace, texts))
        return pl.concat([other.with_columns(further), own.with_columns(later)]).cast(own.schema)

    return replace(
        trace,
        names=(*trace.names, *capture.names),
        ops=pl.concat([moved(capture.ops), trace.ops]).cast(trace.ops.schema),
        ranges=pl.concat([moved(ranges), trace.ranges]).cast(trace.ranges.schema),
        sized_ops=numbered(trace.sized_ops, capture.sized_ops, "shapes"),
        shapes=(*trace.shapes, *capture.shapes),
        op_inputs=numbered(trace.op_inputs, capture.op_inputs, "inputs"),
        inputs=(*trace.inputs, *capture.inputs),
    )


def captures_beside(path: Path, trace: Trace) -> list[Path]:
    """Traces of captures that may belong to this one: with 'capture' in their name, or in a folder so called, beside it.

    Those named after a batch size of the trace first, then those whose names begin alike.
    """
    patterns = ("*[Cc]aptur*.json", "*[Cc]aptur*.json.gz", "*[Cc]aptur*/*.json", "*[Cc]aptur*/*.json.gz")
    files = {one for pattern in patterns for one in path.parent.glob(pattern)} - {path}
    sizes = {number for name in trace.names if is_iteration(name) for number in _NUMBER.findall(name)}

    def far(one: Path) -> tuple[bool, int, str]:
        alike = next((i for i, pair in enumerate(zip(one.name, path.name)) if pair[0] != pair[1]), len(one.name))  # noqa: B905
        return sizes.isdisjoint(_NUMBER.findall(one.name)), -alike, one.name

    return sorted(files, key=far)[:_MOST_FILES]
