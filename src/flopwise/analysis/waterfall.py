"""From the ideal step to the measured one: where every nanosecond between them went. The parts add up to the step exactly."""

import math
from collections.abc import Iterator, Mapping, Sequence

import polars as pl

from flopwise import units
from flopwise.analysis import idle as causes
from flopwise.analysis.bandwidth import Key, at_bandwidth, bytes_ns
from flopwise.analysis.blame import OUTSIDE, HostBlame
from flopwise.analysis.computing import BY_WORKLOAD, Computing, KnownWork, computing
from flopwise.analysis.idle import Idle
from flopwise.analysis.limit import step_limit
from flopwise.analysis.products import Gap
from flopwise.analysis.timed_work import (
    AGAIN,
    CASTS,
    COMMUNICATES,
    CORE,
    MOVES_TO_HOST,
    MOVING,
    UPDATE,
    TimedWork,
    timed_work,
)
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.predict.flops import mfu
from flopwise.predict.op_time import matmul_limits
from flopwise.records import waterfall as parts
from flopwise.records.ceilings import MEASURED, Ceilings
from flopwise.records.untraced import UntracedStep
from flopwise.records.waterfall import PARTS, Waterfall, WaterfallPart
from flopwise.spec.gpu import Gpu
from flopwise.work.op_rules import causal_share
from flopwise.work.operation import ATTENTION

PREDICTED = "predicted"
WORTH_NAMING = 0.001  # of the step
UNTRACED, TRACED = "the untraced step", "the trace"
PART_OF_CAUSE = {  # of a cause: the part it counts in; all others are IDLE_OTHER
    causes.LATE_LAUNCH: parts.IDLE_LAUNCH,
    causes.SYNCHRONISATION: parts.IDLE_SYNCHRONISATION,
    causes.INPUT: parts.IDLE_INPUT,
    causes.TRANSFER: parts.IDLE_INPUT,
    causes.HOST: parts.IDLE_HOST,
    causes.COMPILATION: parts.IDLE_COMPILATION,
    causes.ALLOCATOR: parts.IDLE_ALLOCATOR,
}
_WAITED = {
    parts.IDLE_LAUNCH: "the host had not yet launched what came next",
    parts.IDLE_SYNCHRONISATION: "the host waited for the GPU, or had just done so",
    parts.IDLE_INPUT: "the host waited for data, or copied it out of pageable memory",
    parts.IDLE_HOST: "the host ran other code and launched nothing",
    parts.IDLE_COMPILATION: "the host compiled, or loaded kernels",
    parts.IDLE_ALLOCATOR: "the host asked the driver for memory, or gave some back",
}


def waterfall(
    steps: TracedSteps,
    ceilings: Ceilings,
    gpu: Gpu,
    *,
    known: KnownWork | None = None,
    untraced: tuple[UntracedStep, Idle] | None = None,
    held: tuple[float, int] | None = None,
) -> Waterfall:
    """From the ideal to the measured step.

    `known` is the step's work where its workload is known; else only what the sizes in the trace give is. `untraced`:
    one step without the profiler, and the idle time of all steps then; the parts add up to that step. `held`: the clock
    that the power cap left, and the highest, in MHz.
    """
    without, idle = untraced or (None, steps.idle)
    step_ns = without.ns if without else (steps.high_ns - steps.low_ns) / len(steps.steps)
    work = timed_work(steps, step_ns, idle)
    done = computing(work, known, ceilings)
    found = {
        part.name: part
        for some in (
            _computed(done, work, ceilings, gpu),
            _memory_bound(work, known, ceilings),
            _others(work, known, ceilings),
            _idle(work, idle, steps.blame, without),
        )
        for part in some
    }
    peak = gpu.peaks.get(done.used)
    made = tuple(found[name] for name in PARTS if name in found and found[name].ns)
    return Waterfall(
        step_ns=step_ns,
        untraced=without,
        measured_by=_measured_by(without),
        parts=made,
        mfu=mfu(done.useful_flops, step_ns / 1e9, peak) if done.useful_flops and peak else None,
        hfu=mfu(done.done_flops, step_ns / 1e9, peak) if done.done_flops and peak else None,
        roofline_share=_least_ns(known, ceilings) / step_ns if known else None,
        precision=done.used,
        peak_share=matmul_limits(done.used, ceilings).peak_flops / peak if peak else None,
        convention=_convention(done, known, gpu),
        notes=(*done.notes, *_scaled(work)),
        limit=step_limit(made, step_ns, done, known.ops if known else None, ceilings, gpu, held),
    )


def _measured_by(step: UntracedStep | None) -> str:
    if step is None:
        return TRACED
    if step.measured:
        return UNTRACED
    return f"an estimate of {UNTRACED}: {units.duration(step.low_ns)} to {units.duration(step.high_ns)}"


def _part(
    work: TimedWork, name: str, ns: float, why: str, by_class: Mapping[str, float] | None = None, how: str = MEASURED
) -> WaterfallPart:
    some = {kind: spent for kind, spent in (by_class or {}).items() if spent}
    return WaterfallPart(name=name, ns=ns, share=ns / work.step_ns, how=how, why=why, by_class=some)


def _computed(done: Computing, work: TimedWork, ceilings: Ceilings, gpu: Gpu) -> Iterator[WaterfallPart]:
    """The ideal, what matmuls took beyond it, and attention."""
    gap, core_ns = done.gap, work.ns(CORE)
    how = PREDICTED if done.known_by else MEASURED
    ideal = {"matmul": gap.ideal, "attention": done.attention_ideal_ns}
    yield _part(work, parts.IDEAL, sum(ideal.values()), _rate(done.used, ceilings, gpu), ideal, ceilings.how)
    precision = _with_worst(f"slower kernels than {done.used}", gap, "precision")
    yield _part(work, parts.MATMUL_PRECISION, gap.precision, precision, how=ceilings.how)
    shape = _with_worst("tiles and waves that are not full, or few FLOPs per byte", gap, "shape")
    yield _part(work, parts.MATMUL_SHAPE, gap.shape, shape, how=how)
    unaligned = _with_worst("rows that are no multiple of 16 bytes", gap, "unaligned")
    yield _part(work, parts.MATMUL_UNALIGNED, gap.unaligned, unaligned, how=how)
    yield _part(work, parts.MATMUL_OTHER, gap.other, _matmul_rest(done), how=how)
    attention = {"fused": done.attention_ns, "softmax, mask, scale": core_ns}
    rest = _attention_rest(done.attention_ns, core_ns)
    limit = ceilings.how if done.attention_ideal_ns else MEASURED
    yield _part(work, parts.ATTENTION_PART, done.attention_ns + core_ns, rest, attention, limit)


def _with_worst(why: str, gap: Gap, part: str) -> str:
    return "; ".join((why, gap.worst[part])) if part in gap.worst else why


def _rate(used: str, ceilings: Ceilings, gpu: Gpu) -> str:
    limits, peak = ceilings.matmul.get(used), gpu.peaks.get(used)
    if limits is None:
        return ""
    source = "measured on this kind of GPU" if ceilings.how == MEASURED else "what libraries usually reach"
    text = f"{used} at {units.rate(limits.peak_flops, 'FLOP/s')}: {source}"
    if not peak:
        return text
    return f"{text}, {units.percent(limits.peak_flops / peak, 0)} of the datasheet's {units.rate(peak, 'FLOP/s')}"


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


def _memory_bound(work: TimedWork, known: KnownWork | None, ceilings: Ceilings) -> Iterator[WaterfallPart]:
    """Everything else that a step computes once: at full bandwidth, and beyond."""
    phases = work.phases_known
    took = _by_key(work.of(MOVING), phases=phases)
    if known is None:
        whole = _by_class(took)
        why = "not split by bandwidth without the workload: all of its time is here"
        yield _part(work, parts.BELOW_BANDWIDTH, sum(whole.values()), why, whole)
        return
    least = at_bandwidth(took, bytes_ns(known.ops, ceilings, phases=phases))
    full, below = _by_class(least), _by_class({key: ns - least[key] for key, ns in took.items()})
    why = f"every tensor once, at {units.rate(ceilings.bandwidth_bytes_per_s, 'B/s')}"
    yield _part(work, parts.MEMORY_BOUND, sum(full.values()), why, full, ceilings.how)
    yield _part(work, parts.BELOW_BANDWIDTH, sum(below.values()), "what it took beyond", below, ceilings.how)


def _by_key(rows: pl.DataFrame, *, phases: bool) -> dict[Key, float]:
    spent: dict[Key, float] = {}
    for phase, kind, ns in rows.select("phase", "class", "ns").iter_rows():
        key = phase if phases else "", kind
        spent[key] = spent.get(key, 0.0) + ns
    return spent


def _by_class(spent: Mapping[Key, float]) -> dict[str, float]:
    """The largest first; those of no time are left out."""
    classes: dict[str, float] = {}
    for (_, kind), ns in spent.items():
        classes[kind] = classes.get(kind, 0.0) + ns
    return dict(sorted(((kind, ns) for kind, ns in classes.items() if ns), key=lambda item: (-item[1], item[0])))


def _others(work: TimedWork, known: KnownWork | None, ceilings: Ceilings) -> Iterator[WaterfallPart]:
    again, update, talk = (_by_class(_by_key(work.of(what), phases=False)) for what in (AGAIN, UPDATE, COMMUNICATES))
    moved = sum(op.read_bytes + op.write_bytes for op in known.ops if op.phase == "optimizer") if known else 0
    least = units.duration(1e9 * moved / ceilings.bandwidth_bytes_per_s)
    why = [f"its {units.size(moved)} take {least} at full bandwidth"] if moved else []
    hidden = math.fsum(work.of(UPDATE)["hidden_ns"])
    if hidden >= WORTH_NAMING * work.step_ns:
        why.append(f"{units.duration(hidden)} more overlapped with other work")
    yield _part(work, parts.FP8_CASTS, work.ns(CASTS), "what fp8 products need before them, in kernels of their own")
    yield _part(work, parts.RECOMPUTATION, sum(again.values()), "computed again in the backward pass", again)
    yield _part(work, parts.OPTIMIZER_PART, sum(update.values()), "; ".join(why), update)
    yield _part(work, parts.EXPOSED_COMMUNICATION, sum(talk.values()), "while nothing else ran")
    yield _part(work, parts.TRANSFERS, work.ns(MOVES_TO_HOST), "while nothing else ran")


def _idle(
    work: TimedWork, idle: Idle, blamed: Sequence[HostBlame], step: UntracedStep | None
) -> Iterator[WaterfallPart]:
    """By cause; with it the time in which the GPU did other work than these steps'."""
    how = PREDICTED if step is not None and not step.measured else MEASURED
    by_part: dict[str, dict[str, float]] = {}
    for cause, ns in (*idle.by_cause_ns.items(), ("other work", work.elsewhere_ns * work.n)):
        by_part.setdefault(PART_OF_CAUSE.get(cause, parts.IDLE_OTHER), {})[cause] = ns / work.n
    for name, spent in by_part.items():
        named = ", ".join(f"{cause} {units.duration(ns)}" for cause, ns in spent.items() if ns)
        most = next((f"; most in {one.what}" for one in blamed if one.cause in spent and one.what != OUTSIDE), "")
        yield _part(work, name, sum(spent.values()), _WAITED.get(name, named) + most, spent, how)


def _least_ns(known: KnownWork, ceilings: Ceilings) -> float:
    """What the ops must take one after the other: FLOPs at the peak of their precision, or bytes at full bandwidth."""
    total = 0.0
    for op in (op for op in known.ops if op.kernels):
        masked = known.causal and op.kind == ATTENTION and op.flops and op.shapes
        flops = op.flops * (causal_share(op.shapes[0][-2]) if masked else 1.0)
        compute_s = flops / matmul_limits(op.dtype, ceilings).peak_flops
        total += 1e9 * max(compute_s, (op.read_bytes + op.write_bytes) / ceilings.bandwidth_bytes_per_s)
    return total


def _convention(done: Computing, known: KnownWork | None, gpu: Gpu) -> str:
    """How FLOPs are counted."""
    if done.useful_flops is None:
        return ""
    text = "matmuls only, two FLOPs a multiply-add, attention's squares whole; MFU and HFU"
    if peak := gpu.peaks.get(done.used):
        text += f" of the datasheet's dense {units.rate(peak, 'FLOP/s')} of {done.used}"
    if known and known.causal and done.attention_ideal_ns:
        text += "; of fused attention the ideal has only what the mask leaves"
    return text


def _scaled(work: TimedWork) -> list[str]:
    longer = units.percent(1 / work.scale - 1)
    note = f"traced kernels took {longer} longer than fits into the untraced step: scaled to it"
    return [note] if abs(work.scale - 1) >= 0.005 else []
