"""The FLOPs of a step beside the time they took: matrix products and fused attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import polars as pl

from flopwise.analysis.products import Gap, Product, precision_used, products_of_ops, products_of_trace, split
from flopwise.analysis.timed_work import AGAIN, FUSED, GRAPH, PRODUCTS, TimedWork
from flopwise.records.ceilings import Ceilings
from flopwise.work.op_rules import causal_share
from flopwise.work.operation import ATTENTION, OpWork
from flopwise.work.sized import ATTENTIONS, attention_flops

MOST_UNSIZED = 0.05  # of the time in products and attention: beyond, the step's FLOPs are not known
BY_SIZES, BY_WORKLOAD, NOT_KNOWN = "the sizes in the trace", "the workload", ""


class KnownWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a step must do, where its workload is known; of a compiled one, as a compiler fuses it."""

    ops: tuple[OpWork, ...]
    model_flops: float | None = None  # attention's squares whole, nothing twice
    causal: bool = True  # fused attention need not do the masked half


@dataclass(frozen=True)
class Computing:
    """Products and fused attention. FLOPs are None where too little of them is known."""

    used: str  # the precision
    gap: Gap  # of the products
    known_by: str  # how the products' FLOPs are known
    attention_ideal_ns: float
    attention_ns: float  # fused, beyond its ideal
    useful_flops: float | None
    done_flops: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Flops:
    """Of fused attention."""

    useful: float = 0.0  # whole squares, nothing twice
    needed: float = 0.0  # of these, what the mask leaves
    done: float = 0.0


def computing(work: TimedWork, known: KnownWork | None, ceilings: Ceilings) -> Computing:
    """Set the FLOPs of products and attention at the peak of the precision used, and say what the rest of their time was."""
    rows = work.of(PRODUCTS)
    sized = products_of_trace(rows, work.shapes, work.n, work.scale)
    total_ns = work.ns(PRODUCTS)
    sized_ns = sum(one.ns or 0.0 for one in sized)
    graph_ns = work.ns(GRAPH)
    of_ops = products_of_ops(_once(known.ops)) if known else []
    by_ops = bool(of_ops) and (graph_ns > 0 or sized_ns < (1 - MOST_UNSIZED) * total_ns)
    products = of_ops if by_ops else sized
    used = precision_used(products, rows)
    attention, attention_told = _attention(work, known)
    peak = (ceilings.matmul.get(used) or ceilings.matmul["fp32"]).peak_flops
    attention_ideal = 1e9 * attention.needed / peak if attention_told and used else 0.0
    fused_ns = work.ns(FUSED)
    if not fused_ns and not graph_ns:
        attention_ideal = 0.0
    if by_ops:
        gap = split(products, used, ceilings, total_ns + graph_ns - (0.0 if fused_ns else attention_ideal))
    else:
        gap = split(products, used, ceilings) + Gap(other=total_ns + graph_ns - sized_ns)
    unsized = 0.0 if by_ops else total_ns + graph_ns - sized_ns
    unsized += 0.0 if attention_told else fused_ns
    complete = bool(products or attention.useful) and unsized <= MOST_UNSIZED * (total_ns + graph_ns + fused_ns)
    useful, done = _flops(products, attention, work, known) if complete else (None, None)
    return Computing(
        used=used,
        gap=gap,
        known_by=BY_WORKLOAD if by_ops else BY_SIZES if sized else NOT_KNOWN,
        attention_ideal_ns=attention_ideal,
        attention_ns=fused_ns - attention_ideal if fused_ns else 0.0,
        useful_flops=useful,
        done_flops=done,
        notes=_notes(total_ns + graph_ns, unsized, fused_ns, attention, graph_ns),
    )


def _once(ops: Sequence[OpWork]) -> list[OpWork]:
    """Without what is computed again."""
    return [op for op in ops if op.phase != "recompute"]


def _attention(work: TimedWork, known: KnownWork | None) -> tuple[_Flops, bool]:
    """FLOPs of fused attention, and whether they are all of it: by the sizes of its ops, else by the workload."""
    sized = _attention_of(work.of(FUSED), work)
    if sized is None and known is None:
        return _Flops(), not work.ns(FUSED)
    ops = [op for op in _once(known.ops) if op.kind == ATTENTION and op.flops] if known else []
    share = causal_share(ops[0].shapes[0][-2]) if ops and known and known.causal and ops[0].shapes else 1.0
    if sized is None:
        done = sum(op.flops for op in ops)
        useful = sum(op.flops * (0.8 if op.phase == "backward" else 1.0) for op in ops)  # four products of its five
        sized = _Flops(useful=useful, done=done)
    return _Flops(useful=sized.useful, needed=sized.useful * share, done=sized.done), True


def _attention_of(rows: pl.DataFrame, work: TimedWork) -> _Flops | None:
    """By the sizes of the ops; None if one of them has none."""
    told = rows.filter(pl.col("class") == ATTENTION)
    if not told.height or (told["shape"] == 0).any():
        return None
    useful = done = 0.0
    ops = (
        rows.filter(pl.col("op").is_in(ATTENTIONS), pl.col("ops") > 0).group_by("op", "shape").agg(pl.col("ops").sum())
    )
    for op, shape, count in ops.iter_rows():
        flops = attention_flops(op, work.shapes[shape])
        if flops is None:
            return None
        useful, done = useful + flops.useful * count / work.n, done + flops.done * count / work.n
    return _Flops(useful=useful, done=done)


def _flops(
    products: Sequence[Product], attention: _Flops, work: TimedWork, known: KnownWork | None
) -> tuple[float, float]:
    """Useful, and done: with what is computed again."""
    if known is not None and known.model_flops is not None:
        return known.model_flops, float(sum(op.flops for op in known.ops))
    useful = sum(one.flops for one in products)
    again = work.of(AGAIN)
    repeated = sum(one.flops for one in products_of_trace(again, work.shapes, work.n))
    more = _attention_of(again, work)
    return useful + attention.useful, useful + attention.done + repeated + (more.done if more else 0.0)


def _notes(products_ns: float, unsized: float, fused_ns: float, attention: _Flops, graph_ns: float) -> tuple[str, ...]:
    notes = []
    if unsized > MOST_UNSIZED * (products_ns + fused_ns):
        notes.append(
            "the FLOPs of the step are unknown: the trace does not hold the sizes of its matmuls or attention "
            "(torch.profiler: record_shapes=True; flopwise profile captures them)"
        )
    if graph_ns:
        notes.append("CUDA graphs traced as one row each count as matmul: which kernels they hold is unknown")
    if attention.useful and not fused_ns and not graph_ns:
        notes.append("no kernel of fused attention was recognised: its FLOPs are left out of the ideal")
    return tuple(notes)
