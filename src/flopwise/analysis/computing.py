"""The FLOPs of a step and the time they took: matrix products and fused attention."""

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
    complete: bool = True  # all of it is known


def computing(work: TimedWork, known: KnownWork | None, ceilings: Ceilings) -> Computing:
    """Compare the time of products and attention with that of their FLOPs at the peak of the precision used."""
    rows, graph_ns, fused_ns = work.of(PRODUCTS), work.ns(GRAPH), work.ns(FUSED)
    products_ns = work.ns(PRODUCTS) + graph_ns
    sized = products_of_trace(rows, work.shapes, work.n, work.scale)
    of_workload = products_of_ops(_once(known.ops)) if known else []
    by_workload = bool(of_workload) and not _sizes_suffice(sized, work)
    products = of_workload if by_workload else sized
    used = precision_used(products, rows)
    attention = _attention(work, known)
    ideal_ns = _attention_ideal_ns(attention, used, ceilings) if fused_ns or graph_ns else 0.0
    if by_workload:
        unsized_ns = 0.0
        gap = split(products, used, ceilings, products_ns - (0.0 if fused_ns else ideal_ns))
    else:
        unsized_ns = products_ns - _sized_ns(sized)
        gap = split(products, used, ceilings) + Gap(other=unsized_ns)
    unsized_ns += 0.0 if attention.complete else fused_ns
    complete = bool(products or attention.useful) and unsized_ns <= MOST_UNSIZED * (products_ns + fused_ns)
    useful, done = _flops(products, attention, work, known) if complete else (None, None)
    return Computing(
        used=used,
        gap=gap,
        known_by=BY_WORKLOAD if by_workload else BY_SIZES if sized else NOT_KNOWN,
        attention_ideal_ns=ideal_ns,
        attention_ns=fused_ns - ideal_ns if fused_ns else 0.0,
        useful_flops=useful,
        done_flops=done,
        notes=_notes(products_ns, unsized_ns, fused_ns, attention, graph_ns),
    )


def _sized_ns(products: Sequence[Product]) -> float:
    return sum(one.ns or 0.0 for one in products)


def _sizes_suffice(sized: Sequence[Product], work: TimedWork) -> bool:
    """Whether the trace has the sizes of nearly all products; what a whole graph holds is not known."""
    return work.ns(GRAPH) <= 0 and _sized_ns(sized) >= (1 - MOST_UNSIZED) * work.ns(PRODUCTS)


def _attention_ideal_ns(attention: _Flops, used: str, ceilings: Ceilings) -> float:
    """The time of what the mask leaves, at the peak."""
    peak = (ceilings.matmul.get(used) or ceilings.matmul["fp32"]).peak_flops
    return 1e9 * attention.needed / peak if attention.complete and used else 0.0


def _once(ops: Sequence[OpWork]) -> list[OpWork]:
    """Without what is computed again."""
    return [op for op in ops if op.phase != "recompute"]


def _attention(work: TimedWork, known: KnownWork | None) -> _Flops:
    """By the sizes of its ops, else by the workload."""
    sized = _attention_of(work.of(FUSED), work)
    if sized is None and known is None:
        return _Flops(complete=not work.ns(FUSED))
    ops = [op for op in _once(known.ops) if op.kind == ATTENTION and op.flops] if known else []
    share = causal_share(ops[0].shapes[0][-2]) if ops and known and known.causal and ops[0].shapes else 1.0
    if sized is None:
        done = sum(op.flops for op in ops)
        useful = sum(op.flops * (0.8 if op.phase == "backward" else 1.0) for op in ops)  # four products of its five
        sized = _Flops(useful=useful, done=done)
    return _Flops(useful=sized.useful, needed=sized.useful * share, done=sized.done)


def _attention_of(rows: pl.DataFrame, work: TimedWork) -> _Flops | None:
    """By the sizes of the ops; None if one of them has none."""
    attention = rows.filter(pl.col("class") == ATTENTION)
    if not attention.height or (attention["shape"] == 0).any():
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
