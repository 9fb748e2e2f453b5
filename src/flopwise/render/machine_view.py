"""A machine as tables: what it can do, and its measured limits."""

from collections.abc import Sequence

import msgspec

from flopwise import units
from flopwise.capture.doctor import Check
from flopwise.records.ceilings import Ceilings
from flopwise.records.table import Column, Table
from flopwise.render.json import document
from flopwise.render.table import View, columns
from flopwise.spec.gpu import find_gpu

_ATTENTION_FLOPS = {"small": 1e10, "large": 1e12}  # forward
_BACKWARD = 2.5  # times the forward FLOPs
_MOVED_BYTES = (1e6, 1e7, 1e8, 1e9)


def doctor_view(checks: Sequence[Check]) -> View:
    """Each check with its result and what to do."""
    rows = tuple(msgspec.structs.asdict(check) for check in checks)
    shown = columns("name: check | state | found: result [sentence] | advice: what to do [sentence]")
    return View([Table("doctor", "This machine", shown, rows)], document("doctor", checks=rows))


def ceilings_view(found: Ceilings) -> View:
    """Measured rates with the datasheet's, attention by backend, bandwidth by class of kernel, and the cost of a launch."""
    tables = [_rates(found), _attention(found), _bandwidths(found), _launches(found)]
    return View(tables, document("ceilings", ceilings=found))


def _rates(found: Ceilings) -> Table:
    spec = find_gpu(found.gpu)
    rows = []
    for dtype, limits in found.matmul.items():
        peak = spec.peaks.get(dtype) if spec else None
        share = limits.peak_flops / peak if peak else None
        rows.append({"dtype": dtype, "measured_flops": limits.peak_flops, "specified_flops": peak, "share": share})
    vector = units.rate(found.vector_flops_per_s, "FLOP/s")
    heading = (
        "dtype: matmul in | measured_flops: measured [flops_per_s] | specified_flops: specified [flops_per_s] | share"
    )
    notes = (f"fp32 multiply-adds outside matmuls: {vector}",) if found.vector_flops_per_s else ()
    return Table("matmul-rates", f"Ceilings of {found.gpu}, {found.how}", columns(heading), tuple(rows), notes)


def _attention(found: Ceilings) -> Table:
    ways = {"forward": (found.attention, 1.0), "backward": (found.attention_backward, _BACKWARD)}
    sizes = [(phase, size, flops * ways[phase][1]) for phase in ways for size, flops in _ATTENTION_FLOPS.items()]
    rows = tuple(
        {"way": way}
        | {
            f"{phase}_{size}": 1e9 * flops / ways[phase][0][way].at(flops)
            for phase, size, flops in sizes
            if way in ways[phase][0]
        }
        for way in found.attention
    )
    rates = (Column(f"{p}_{s}", f"{p}, {units.rate(flops, 'FLOP')}", "flops_per_s") for p, s, flops in sizes)
    notes = (
        "FLOPs count the whole square of scores, of which a causal kernel does about half",
        "without a name: the backend that PyTorch picks; flash: FlashAttention-2; triton: flopwise's own; wide: heads of more "
        "than 64 numbers",
    )
    return Table("attention-rates", "Fused attention by backend", (Column("way", "precision"), *rates), rows, notes)


def _bandwidths(found: Ceilings) -> Table:
    rows = tuple(
        {"kind": kind, "shortest_ns": curve.ns[0]}
        | {f"bytes_per_s_at_{n:.0e}": 1e9 * n / curve.at(n) for n in _MOVED_BYTES if n < 2 * curve.amount[-1]}
        for kind, curve in found.memory.items()
    )
    rates = (Column(f"bytes_per_s_at_{n:.0e}", f"moving {n / 1e6:.0f} MB", "bytes_per_s") for n in _MOVED_BYTES)
    spec = find_gpu(found.gpu)
    specified = spec.bandwidth_bytes_s if spec else None
    beside = f"; specified {units.rate(specified, 'B/s')}" if specified else ""
    notes = [f"elementwise, more than any cache holds: {units.rate(found.bandwidth_bytes_per_s, 'B/s')}{beside}"]
    if (rate := found.cache_bytes_per_s) and rate > found.bandwidth_bytes_per_s:
        most = units.rate(rate, "B/s")
        notes.append(f"from the cache, up to {found.cached_bytes / 1e6:.0f} MB moved: at most {most}")
    title = "Memory bandwidth by class of kernel and bytes moved"
    return Table("bandwidths", title, (*columns("kind | shortest_ns"), *rates), rows, tuple(notes))


def _launches(found: Ceilings) -> Table:
    costs = found.host | {f"{phase}, compiled": cost for phase, cost in found.compiled.items()}
    rows = tuple(
        {"phase": phase, "op_ns": cost.op_ns, "cast_ns": cost.cast_ns, "view_ns": cost.view_ns or None}
        | {"kernel_ns": cost.kernel_ns, "listed_ns": cost.listed_ns or None, "start_ns": cost.start_ns or None}
        for phase, cost in costs.items()
    )
    heading = (
        "phase | op_ns: an operation | cast_ns: a cast | view_ns: a view | kernel_ns: a further kernel | "
        "listed_ns: a tensor in a list | start_ns: starting the phase"
    )
    notes = []
    if found.latency_ns:  # a CPU does the work itself
        notes.append(f"from launch to start {units.duration(found.latency_ns)}")
        notes.append(f"a kernel after one of another kind takes {_more(found.switch_ns)}")
        notes.append(f"a kernel in a CUDA graph takes {_more(found.graph_gap_ns)}")
    if found.latency_ns and found.compiled_call_ns:
        notes.append(f"calling a compiled graph takes {units.duration(found.compiled_call_ns)}")
    return Table("launch-costs", "CPU time to launch", columns(heading), rows, tuple(notes))


def _more(ns: float) -> str:
    return f"{units.duration(abs(ns))} {'less' if ns < 0 else 'more'}"
