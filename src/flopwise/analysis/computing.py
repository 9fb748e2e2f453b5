"""The FLOPs of a step and the time they took: matrix products and fused attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import polars as pl

from flopwise.analysis.products import Gap, Product, precision_used, products_of_ops, products_of_trace, split
from flopwise.analysis.timed_work import AGAIN, FUSED, GRAPH, PRODUCTS, TimedWork
from flopwise.predict.op_time import matmul_limits
from flopwise.records.ceilings import Ceilings
from flopwise.work.op_rules import causal_share
from flopwise.work.operation import ATTENTION, OpWork
from flopwise.work.sized import ATTENTIONS, attention_flops

MOST_UNSIZED = 0.05  # of the time in products and attention: beyond, the step's FLOPs are not known
FASTEST = 1.5  # times the usual peak rate, and no product goes: the kernels were not all recognised
_UNSEEN = "the kernels of some matmuls were not recognised: their time is with other work, and FLOPs are left out"
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
    products: Sequence[Product] = ()  # without what is computed again
    attention_flops: float = 0.0  # fused: what the mask leaves, nothing twice
    attention_in: str = ""  # the precision that fused attention is in


@dataclass(frozen=True)
class _Flops:
    """Of fused attention."""

    useful: float = 0.0  # whole squares, nothing twice
    needed: float = 0.0  # of these, what the mask leaves
    done: float = 0.0
    complete: bool = True  # all of it is known


@dataclass(frozen=True)
class _Products:
    """Of a step, by its workload or by the sizes in its trace."""

    known_by: str
    all: Sequence[Product]
    used: str
    gap: Gap
    unsized_ns: float = 0.0
    unseen: bool = False  # by the workload there are more than the kernels that were recognised can be


def computing(work: TimedWork, known: KnownWork | None, ceilings: Ceilings) -> Computing:
    """Compare the time of products and attention with that of their FLOPs at the peak of the precision used."""
    graph_ns, fused_ns, attention = work.ns(GRAPH), work.ns(FUSED), _attention(work, known)
    products_ns = work.ns(PRODUCTS) + graph_ns

    def ideal_ns(used: str) -> float:
        return _attention_ideal_ns(attention, used, ceilings) if fused_ns or graph_ns else 0.0

    found = _products(work, known, ceilings, lambda used: products_ns - (0.0 if fused_ns else ideal_ns(used)))
    ideal, unsized_ns = ideal_ns(found.used), found.unsized_ns + (0.0 if attention.complete else fused_ns)
    complete = bool(found.all or attention.useful) and unsized_ns <= MOST_UNSIZED * (products_ns + fused_ns)
    useful, done = _flops(found.all, attention, work, known) if complete or found.unseen else (None, None)
    return Computing(
        used=found.used,
        gap=found.gap,
        known_by=found.known_by,
        attention_ideal_ns=ideal,
        attention_ns=fused_ns - ideal if fused_ns else 0.0,
        useful_flops=useful,
        done_flops=done,
        notes=_notes(products_ns, unsized_ns, fused_ns, attention, graph_ns, found.unseen),
        products=found.all,
        attention_flops=attention.needed if ideal else 0.0,
        attention_in=_attention_in(found.used),
    )


def _products(
    work: TimedWork, known: KnownWork | None, ceilings: Ceilings, took_ns: Callable[[str], float]
) -> _Products:
    """By the workload where the trace has too few sizes; `took_ns`: all products together, by the precision used."""
    rows, unseen = work.of(PRODUCTS), False
    sized = products_of_trace(rows, work.shapes, work.n, work.scale)
    of_workload = products_of_ops(_once(known.ops)) if known else []
    if of_workload and not _sizes_suffice(sized, work):
        used = precision_used(of_workload, rows)
        gap = split(of_workload, used, ceilings, took_ns(used))
        unseen = gap.ideal > FASTEST * took_ns(used)
        if not unseen:
            return _Products(BY_WORKLOAD, of_workload, used, gap)
    used, unsized_ns = precision_used(sized, rows), work.ns(PRODUCTS) + work.ns(GRAPH) - _sized_ns(sized)
    gap = split(sized, used, ceilings) + Gap(other=unsized_ns)
    return _Products(BY_SIZES if sized else NOT_KNOWN, sized, used, gap, unsized_ns, unseen)


def _sized_ns(products: Sequence[Product]) -> float:
    return sum(one.ns or 0.0 for one in products)


def _sizes_suffice(sized: Sequence[Product], work: TimedWork) -> bool:
    """Whether the trace has the sizes of nearly all products; what a whole graph holds is not known."""
    return work.ns(GRAPH) <= 0 and _sized_ns(sized) >= (1 - MOST_UNSIZED) * work.ns(PRODUCTS)


def _attention_ideal_ns(attention: _Flops, used: str, ceilings: Ceilings) -> float:
    """The time of what the mask leaves, at the peak."""
    peak = matmul_limits(_attention_in(used), ceilings).peak_flops
    return 1e9 * attention.needed / peak if attention.complete and used else 0.0


def _attention_in(used: str) -> str:
    """Where linear layers are in fp8, attention is in bf16."""
    return "bf16" if used == "fp8" else used


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


def _notes(
    products_ns: float, unsized: float, fused_ns: float, attention: _Flops, graph_ns: float, unseen: bool
) -> tuple[str, ...]:
    notes = [_UNSEEN] if unseen else []
    if not unseen and unsized > MOST_UNSIZED * (products_ns + fused_ns):
        notes.append(
            "the FLOPs of the step are unknown: the trace does not hold the sizes of its matmuls or attention "
            "(torch.profiler: record_shapes=True; flopwise profile captures them)"
        )
    if graph_ns:
        notes.append("CUDA graphs traced as one row each count as matmul: which kernels they hold is unknown")
    if attention.useful and not fused_ns and not graph_ns:
        notes.append("no kernel of fused attention was recognised: its FLOPs are left out of the ideal")
    return tuple(notes)
