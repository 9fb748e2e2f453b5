"""What a user is shown of a machine's ceilings."""

from flopwise import units
from flopwise.records.ceilings import Ceilings
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.spec.gpu import find_gpu


def ceilings_view(found: Ceilings) -> View:
    """Rates beside the datasheet's, attention by backend, bandwidth by class of kernel, and what a launch costs."""
    return [_rates(found), _attention(found), _bandwidths(found), _launches(found)], document(
        "ceilings", ceilings=found
    )


def _rates(found: Ceilings) -> Table:
    spec = find_gpu(found.gpu)
    rows = [
        {
            "dtype": dtype,
            "measured_flops": limits.peak_flops,
            "specified_flops": spec.peaks.get(dtype) if spec else None,
        }
        for dtype, limits in found.matmul.items()
    ]
    columns = (
        Column("dtype", "matmul in", right=False),
        Column("measured_flops", "measured", _flops),
        Column("specified_flops", "specified", _flops),
        Column("share", "share", units.percent),
    )
    shares = ({"share": row["specified_flops"] and row["measured_flops"] / row["specified_flops"]} for row in rows)  # type: ignore[operator]
    made = tuple(row | share for row, share in zip(rows, shares, strict=True))
    notes: tuple[str, ...] = ()
    if found.vector_flops_per_s:
        notes = (f"fp32 multiply-adds that are no matmul: {_flops(found.vector_flops_per_s)}",)
    return Table(title=f"ceilings of {found.gpu}, {found.how}", columns=columns, rows=made, notes=notes)


def _flops(per_second: float) -> str:
    return units.rate(per_second, "FLOP/s")


def _attention(found: Ceilings) -> Table:
    sizes = {"small": 1e10, "large": 1e12}  # FLOPs forward
    ways = {"forward": (found.attention, 1.0), "backward": (found.attention_backward, 2.5)}
    rows = tuple(
        {"way": way}
        | {
            f"{phase}_{size}": 1e9 * flops * more / curves[way].at(flops * more)
            for phase, (curves, more) in ways.items()
            if way in curves
            for size, flops in sizes.items()
        }
        for way in found.attention
    )
    columns = (
        Column("way", "fused attention in", right=False),
        *(
            Column(f"{phase}_{size}", f"{phase}, {units.rate(flops * more, 'FLOP')}", _flops)
            for phase, (_, more) in ways.items()
            for size, flops in sizes.items()
        ),
    )
    notes = (
        "FLOPs of the whole square of scores, of which a causal kernel does about half; without a name it is the backend "
        "that PyTorch picks, flash is FlashAttention-2, triton is flopwise's own; wide heads have more than 64 numbers",
    )
    return Table(title="fused attention by backend", columns=columns, rows=rows, notes=notes)


def _bytes(per_second: float) -> str:
    return units.rate(per_second, "B/s")


def _bandwidths(found: Ceilings) -> Table:
    sizes = (1e6, 1e7, 1e8, 1e9)
    rows = tuple(
        {"kind": kind, "shortest_ns": curve.ns[0]}
        | {f"bytes_per_s_at_{size:.0e}": 1e9 * size / curve.at(size) for size in sizes if size < 2 * curve.amount[-1]}
        for kind, curve in found.memory.items()
    )
    columns = (
        Column("kind", "class of kernel", right=False),
        Column("shortest_ns", "shortest", units.duration),
        *(Column(f"bytes_per_s_at_{size:.0e}", f"moving {size / 1e6:.0f} MB", _bytes) for size in sizes),
    )
    spec = find_gpu(found.gpu)
    specified = f"; specified {_bytes(spec.bandwidth_bytes_s)}" if spec and spec.bandwidth_bytes_s else ""
    notes = [f"elementwise, of more than any cache holds: {_bytes(found.bandwidth_bytes_per_s)}{specified}"]
    if (rate := found.cache_bytes_per_s) and rate > found.bandwidth_bytes_per_s:
        notes += [
            f"out of the cache, which shows up to {found.cached_bytes / 1e6:.0f} MB moved: at most {_bytes(rate)}"
        ]
    return Table(title="memory by class of kernel and bytes moved", columns=columns, rows=rows, notes=tuple(notes))


def _more(ns: float) -> str:
    return f"{units.duration(abs(ns))} {'less' if ns < 0 else 'more'}"


def _cost(ns: float) -> str:
    return units.duration(ns) if ns else "–"  # too little to be told from its neighbours


def _launches(found: Ceilings) -> Table:
    costs = found.host | {f"{phase}, compiled": cost for phase, cost in found.compiled.items()}
    rows = tuple(
        {"phase": phase, "op_ns": cost.op_ns, "view_ns": cost.view_ns or None, "kernel_ns": cost.kernel_ns}
        | {"cast_ns": cost.cast_ns, "listed_ns": cost.listed_ns or None, "start_ns": cost.start_ns or None}
        for phase, cost in costs.items()
    )
    columns = (
        Column("phase", "phase", right=False),
        Column("op_ns", "an operation", _cost),
        Column("cast_ns", "a cast", _cost),
        Column("view_ns", "a view", units.duration),
        Column("kernel_ns", "a further kernel", _cost),
        Column("listed_ns", "a tensor in a list", units.duration),
        Column("start_ns", "the phase at all", units.duration),
    )
    if not found.latency_ns:  # a CPU does the work itself
        return Table(title="the host's time to launch", columns=columns, rows=rows)
    notes = (
        f"from launch to start {units.duration(found.latency_ns)}; "
        f"a kernel among unlike ones takes {_more(found.switch_ns)}, in a CUDA graph {_more(found.graph_gap_ns)}"
        + (f"; a compiled graph's call {units.duration(found.compiled_call_ns)}" if found.compiled_call_ns else ""),
    )
    return Table(title="the host's time to launch", columns=columns, rows=rows, notes=notes)
