"""From the ideal step to the measured one: where every nanosecond between them went. The parts add up to the step exactly."""

import math
from collections.abc import Mapping

import msgspec
import polars as pl

from flopwise import units
from flopwise.analysis import idle as idling
from flopwise.analysis.bandwidth import Key, at_bandwidth, bytes_ns
from flopwise.analysis.computing import BY_WORKLOAD, Computing, KnownWork, computing
from flopwise.analysis.explained import Explained
from flopwise.analysis.idle import Idle
from flopwise.analysis.products import Gap
from flopwise.analysis.timed_work import AGAIN, CORE, MOVING, TALK, UPDATE, TimedWork, timed_work
from flopwise.predict.flops import mfu
from flopwise.records.ceilings import MEASURED, Ceilings
from flopwise.records.waterfall import (
    ATTENTION_PART,
    BELOW_BANDWIDTH,
    EXPOSED_COMMUNICATION,
    IDEAL,
    IDLE_INPUT,
    IDLE_LAUNCH,
    IDLE_OTHER,
    IDLE_SYNCHRONISATION,
    MATMUL_OTHER,
    MATMUL_PRECISION,
    MATMUL_SHAPE,
    MATMUL_UNALIGNED,
    MEMORY_BOUND,
    OPTIMIZER_PART,
    PARTS,
    RECOMPUTATION,
    Waterfall,
    WaterfallPart,
)
from flopwise.spec.gpu import Gpu
from flopwise.work.op_rules import causal_share
from flopwise.work.operation import ATTENTION, OpWork

PREDICTED = "predicted"
WORTH_TELLING = 0.001  # of the step
UNTRACED, TRACED = "the untraced step", "the trace"
_BY_CAUSE = {
    idling.LATE_LAUNCH: IDLE_LAUNCH,
    idling.SYNCHRONISATION: IDLE_SYNCHRONISATION,
    idling.INPUT: IDLE_INPUT,
    idling.BETWEEN: IDLE_OTHER,
    idling.NOTHING: IDLE_OTHER,
    idling.UNKNOWN: IDLE_OTHER,
}
_WAITED = {
    IDLE_LAUNCH: "the host had not yet launched what came next",
    IDLE_SYNCHRONISATION: "the host had just waited for the GPU",
    IDLE_INPUT: "the host waited for data, or copied it out of pageable memory",
}


class _Part(msgspec.Struct, kw_only=True):
    """A part while it is found."""

    ns: float
    how: str = MEASURED
    why: str = ""
    by_class: dict[str, float] = {}


def waterfall(
    part: Explained,
    ceilings: Ceilings,
    gpu: Gpu,
    *,
    known: KnownWork | None = None,
    untraced: tuple[float, Idle] | None = None,
) -> Waterfall:
    """From the ideal to the measured step.

    `known` is the step's work where its workload is known; else the sizes in the trace tell what they can. `untraced`: the
    time of one step without the profiler, and the idle time of all steps then; the parts add up to that step.
    """
    step_ns = untraced[0] if untraced else (part.high_ns - part.low_ns) / len(part.steps)
    waiting = untraced[1] if untraced else part.idle
    work = timed_work(part, step_ns, waiting)
    done = computing(work, known, ceilings)
    parts = {
        **_computed(done, work, ceilings, gpu),
        **_memory_bound(work, known, ceilings),
        **_others(work, known, ceilings),
        **_idle(work, waiting),
    }
    peak = gpu.peaks.get(done.used)
    return Waterfall(
        step_ns=step_ns,
        measured_by=UNTRACED if untraced else TRACED,
        parts=tuple(
            WaterfallPart(name=name, ns=p.ns, share=p.ns / step_ns, how=p.how, why=p.why, by_class=p.by_class)
            for name in PARTS
            if (p := parts.get(name)) is not None and p.ns
        ),
        mfu=mfu(done.useful_flops, step_ns / 1e9, peak) if done.useful_flops and peak else None,
        hfu=mfu(done.done_flops, step_ns / 1e9, peak) if done.done_flops and peak else None,
        roofline_share=_least_ns(known, ceilings) / step_ns if known else None,
        precision=done.used,
        convention=_convention(done, known, gpu),
        notes=(*done.notes, *_scaled(work)),
    )


def _computed(done: Computing, work: TimedWork, ceilings: Ceilings, gpu: Gpu) -> dict[str, _Part]:
    """The ideal, what matmuls took beyond it, and attention."""
    gap, used = done.gap, done.used
    how = PREDICTED if done.known_by else MEASURED
    core_ns = work.ns(CORE)
    attention = {"fused": done.attention_ns, "softmax, mask, scale": core_ns}
    return {
        IDEAL: _Part(
            ns=gap.ideal + done.attention_ideal_ns,
            how=ceilings.how,
            why=_rate(used, ceilings, gpu),
            by_class=_some({"matmul": gap.ideal, "attention": done.attention_ideal_ns}),
        ),
        MATMUL_PRECISION: _Part(
            ns=gap.precision, how=ceilings.how, why=_with(f"slower kernels than {used}", gap, "precision")
        ),
        MATMUL_SHAPE: _Part(
            ns=gap.shape, how=how, why=_with("tiles and waves that are not full, or few FLOPs per byte", gap, "shape")
        ),
        MATMUL_UNALIGNED: _Part(
            ns=gap.unaligned, how=how, why=_with("rows that are no multiple of 16 bytes", gap, "unaligned")
        ),
        MATMUL_OTHER: _Part(ns=gap.other, how=how, why=_matmul_rest(done)),
        ATTENTION_PART: _Part(
            ns=done.attention_ns + core_ns,
            how=ceilings.how if done.attention_ideal_ns else MEASURED,
            why=_attention_rest(done.attention_ns, core_ns),
            by_class=_some(attention),
        ),
    }


def _some(by_class: Mapping[str, float]) -> dict[str, float]:
    return {name: ns for name, ns in by_class.items() if ns}


def _with(why: str, gap: Gap, part: str) -> str:
    return "; ".join((why, gap.worst[part])) if part in gap.worst else why


def _rate(used: str, ceilings: Ceilings, gpu: Gpu) -> str:
    limits = ceilings.matmul.get(used)
    if limits is None:
        return ""
    peak = gpu.peaks.get(used)
    share = (
        f", {units.percent(limits.peak_flops / peak, 0)} of the datasheet's {units.rate(peak, 'FLOP/s')}"
        if peak
        else ""
    )
    whose = "measured on this kind of GPU" if ceilings.how == MEASURED else "what libraries usually reach"
    return f"{used} at {units.rate(limits.peak_flops, 'FLOP/s')}: {whose}{share}"


def _matmul_rest(done: Computing) -> str:
    if not done.known_by:
        return "all of the matmuls: their sizes are unknown"
    if done.gap.other < 0:
        return "below zero: these matmuls beat the rate that the limit was set by"
    together = ", all matmuls together" if done.known_by == BY_WORKLOAD else ""
    return f"beyond the best tile's time{together}"


def _attention_rest(fused_ns: float, core_ns: float) -> str:
    if fused_ns < 0:
        return "below zero: the kernel skips what is masked, and the ideal counts whole squares"
    if not fused_ns:
        return "scale, mask and softmax, written out between its two matmuls"
    return "beyond its FLOPs at the peak rate" + (", and what is written out" if core_ns else "")


def _memory_bound(work: TimedWork, known: KnownWork | None, ceilings: Ceilings) -> dict[str, _Part]:
    """Everything else that a step computes once: at full bandwidth, and beyond."""
    phases = work.phases_known
    took = _by_key(work.of(MOVING), phases=phases)
    if known is None:
        whole = _by_class(took)
        why = "not split by bandwidth without the workload: all of its time is here"
        return {BELOW_BANDWIDTH: _Part(ns=sum(whole.values()), why=why, by_class=whole)}
    least = at_bandwidth(took, bytes_ns(known.ops, ceilings, phases=phases))
    full, below = _by_class(least), _by_class({key: ns - least[key] for key, ns in took.items()})
    rate = units.rate(ceilings.bandwidth_bytes_per_s, "B/s")
    return {
        MEMORY_BOUND: _Part(
            ns=sum(full.values()), how=ceilings.how, why=f"every tensor once, at {rate}", by_class=full
        ),
        BELOW_BANDWIDTH: _Part(ns=sum(below.values()), how=ceilings.how, why="what it took beyond", by_class=below),
    }


def _by_key(rows: pl.DataFrame, *, phases: bool) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for phase, kind, ns in rows.select("phase", "class", "ns").iter_rows():
        key = phase if phases else "", kind
        found[key] = found.get(key, 0.0) + ns
    return found


def _by_class(found: Mapping[Key, float]) -> dict[str, float]:
    """The largest first; those of no time are left out."""
    classes: dict[str, float] = {}
    for (_, kind), ns in found.items():
        classes[kind] = classes.get(kind, 0.0) + ns
    return dict(sorted(((kind, ns) for kind, ns in classes.items() if ns), key=lambda item: -item[1]))


def _others(work: TimedWork, known: KnownWork | None, ceilings: Ceilings) -> dict[str, _Part]:
    again, update, talk = (_by_class(_by_key(work.of(what), phases=False)) for what in (AGAIN, UPDATE, TALK))
    moved = sum(op.read_bytes + op.write_bytes for op in known.ops if op.phase == "optimizer") if known else 0
    least = units.duration(1e9 * moved / ceilings.bandwidth_bytes_per_s)
    told = [f"its {units.size(moved)} take {least} at full bandwidth"] if moved else []
    beside = math.fsum(work.of(UPDATE)["beside_ns"])
    told += [f"{units.duration(beside)} more ran beside other work"] if beside >= WORTH_TELLING * work.step_ns else []
    return {
        RECOMPUTATION: _Part(ns=sum(again.values()), why="computed again in the backward pass", by_class=again),
        OPTIMIZER_PART: _Part(ns=sum(update.values()), why="; ".join(told), by_class=update),
        EXPOSED_COMMUNICATION: _Part(ns=sum(talk.values()), why="while nothing else ran"),
    }


def _idle(work: TimedWork, waiting: Idle) -> dict[str, _Part]:
    """By cause; with it the time in which the GPU worked for others."""
    parts: dict[str, _Part] = {}
    causes = {cause: ns / work.n for cause, ns in waiting.by_cause_ns.items()} | {"other work": work.elsewhere_ns}
    for cause, ns in causes.items():
        found = parts.setdefault(_BY_CAUSE.get(cause, IDLE_OTHER), _Part(ns=0.0, by_class={}))
        found.ns += ns
        if ns:
            found.by_class[cause] = ns
    for name, found in parts.items():
        causes_told = ", ".join(f"{cause} {units.duration(ns)}" for cause, ns in found.by_class.items())
        found.why = _WAITED.get(name, causes_told)
    return parts


def _least_ns(known: KnownWork, ceilings: Ceilings) -> float:
    """What the ops must take one after the other: FLOPs at the peak of their precision, or bytes at full bandwidth."""
    return sum(max(_compute_ns(op, known, ceilings), _move_ns(op, ceilings)) for op in known.ops if op.kernels)


def _compute_ns(op: OpWork, known: KnownWork, ceilings: Ceilings) -> float:
    masked = known.causal and op.kind == ATTENTION and op.flops and op.shapes
    share = causal_share(op.shapes[0][-2]) if masked else 1.0
    return 1e9 * op.flops * share / (ceilings.matmul.get(op.dtype) or ceilings.matmul["fp32"]).peak_flops


def _move_ns(op: OpWork, ceilings: Ceilings) -> float:
    return 1e9 * (op.read_bytes + op.write_bytes) / ceilings.bandwidth_bytes_per_s


def _convention(done: Computing, known: KnownWork | None, gpu: Gpu) -> str:
    """How FLOPs are counted."""
    if done.useful_flops is None:
        return ""
    peak = gpu.peaks.get(done.used)
    of = f" of the datasheet's dense {units.rate(peak, 'FLOP/s')} of {done.used}" if peak else ""
    ideal = (
        "; of fused attention the ideal has only what the mask leaves"
        if known and known.causal and done.attention_ideal_ns
        else ""
    )
    return f"matmuls only, two FLOPs a multiply-add, attention's squares whole; MFU and HFU{of}{ideal}"


def _scaled(work: TimedWork) -> tuple[str, ...]:
    if abs(work.scale - 1) < 0.005:
        return ()
    return (
        f"traced kernels took {units.percent(1 / work.scale - 1)} longer than fits into the untraced step: scaled to it",
    )
