"""What a lever would save: the step predicted with the lever changed. All predictions that advice needs are asked for here.

The machine's ceilings are corrected first by what was measured of the step as it is: the host's costs by the time it was
busy launching, matmuls and attention of the precision used by their time in the trace, all other kernels by the rest.
What the lever leaves alone then costs what it was measured to cost. A trace also tells how long the GPU pauses before a
kernel that was queued; a CUDA graph is taken to have no pauses.
"""

from collections.abc import Mapping
from functools import lru_cache
from statistics import median
from typing import Any

import msgspec

from flopwise import units
from flopwise.advice import power
from flopwise.advice.constants import GPU_BOUND, HOST_BOUND, HOST_MATTERS, LAUNCH_QUEUE, WIDEST_CORRECTION
from flopwise.advice.facts import Facts
from flopwise.analysis.clocks import held_clock
from flopwise.analysis.idle import BETWEEN
from flopwise.errors import FlopwiseError
from flopwise.predict import fit
from flopwise.predict.machine import Machine
from flopwise.predict.op_time import matmul_shape, op_time
from flopwise.predict.prediction import Prediction, peak_bytes, predict, predict_quickly
from flopwise.predict.recorded.step import RecordedStep
from flopwise.predict.step_time import StepTime
from flopwise.records.ceilings import Ceilings, Curve, HostCost, Matmul, Tile
from flopwise.records.run import PhaseTimes
from flopwise.records.waterfall import Waterfall
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import recipe_from
from flopwise.spec.workload import Workload
from flopwise.work.operation import ATTENTION, MATMUL


class Corrections(msgspec.Struct, frozen=True, kw_only=True):
    """Measured over predicted, of the step as it is."""

    host: dict[str, float] = {}  # by phase; 1 where the clock says nothing
    matmul: float = 1.0  # of the precision used
    attention: float = 1.0
    rest: float = 1.0

    def describe(self) -> str:
        """As it stands in a finding's arithmetic."""
        host = ", ".join(f"{phase} × {factor:.2f}" for phase, factor in self.host.items()) or "× 1.00"
        return f"host {host}, matmul × {self.matmul:.2f}, attention × {self.attention:.2f}, rest × {self.rest:.2f}"


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it is, by the corrected model: the same whichever lever is considered."""

    workload: Workload
    gpu: str
    corrections: Corrections
    limits: Ceilings  # corrected
    now: StepTime
    scale: float  # measured over `now`
    power: float | None = None  # where the power cap slows the step: see `power`
    recorded: RecordedStep | None = None  # of a step that is not our own model's

    @property
    def layers(self) -> int:
        """Of the model: how often its savings repeat."""
        if self.recorded is not None:
            return len(self.recorded.blocks)
        return self.workload.subject.n_layers if isinstance(self.workload.subject, ModelSpec) else 0

    def time_of(self, workload: Workload) -> StepTime:
        """Another workload's step on the same machine."""
        cost = _cost(msgspec.json.encode(workload), self.gpu, self.recorded)
        return power.slowed(cost.time_with(self.limits), self.power)

    def with_layers(self, n_layers: int) -> "Baseline":
        """The same step of a model with so many layers."""
        subject, other, recorded = self.workload.subject, self.workload, self.recorded
        if recorded is not None:
            recorded = recorded.with_blocks(n_layers)
        elif isinstance(subject, ModelSpec):
            other = msgspec.structs.replace(other, subject=msgspec.structs.replace(subject, n_layers=n_layers))
        shallow = msgspec.structs.replace(self, workload=other, recorded=recorded)
        return msgspec.structs.replace(shallow, now=shallow.time_of(other))


class PredictedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it is and with a change, both by the corrected model; `saving_ns` is of the measured step."""

    now: StepTime
    then: StepTime
    saving_ns: float
    gpu_saving_ns: float  # less work for the GPU, whether or not the step gets shorter by it
    arithmetic: str


@lru_cache(maxsize=4)  # every rule asks for that of the same facts
def baseline(facts: Facts) -> Baseline | None:
    """None where the workload is unknown, or the machine's ceilings are."""
    work = facts.workload
    if work is None or facts.ceilings is None or (facts.model is None and facts.recorded is None):
        return None
    name, recorded = facts.gpu.name if facts.gpu is not None else "", facts.recorded if facts.model is None else None
    try:
        cost = _cost(msgspec.json.encode(work), name, recorded)
    except FlopwiseError:
        return None
    plain, measured_ns = cost.time_with(facts.ceilings), facts.untraced_ns
    capped = _is_capped(facts, plain)
    corrections = _corrections(facts, work, plain, capped)
    precision = work.recipe.compute if recorded is None else cost.compute_dtype
    limits = corrected(facts.ceilings, corrections, precision)
    limits = msgspec.structs.replace(limits, pause_ns=_pause_ns(facts, work, plain))
    now = cost.time_with(limits)
    draw = power.strength(now, measured_ns) if measured_ns and capped else None
    now = power.slowed(now, draw)
    scale = _bounded(measured_ns / now.wall_ns) if measured_ns else 1.0
    return Baseline(
        workload=work,
        gpu=name,
        corrections=corrections,
        limits=limits,
        now=now,
        scale=scale,
        power=draw,
        recorded=recorded,
    )


def predicted_change(
    facts: Facts, levers: Mapping[str, str], start: Baseline | None = None, **fields: Any
) -> PredictedChange | None:
    """The step with levers changed, and with `fields` of the workload (`batch=8`) changed.

    None where the workload or the machine is unknown, the levers do not go together, or they find nothing to change in what
    was recorded of a user's step. `start`: instead of `baseline`.
    """
    start = start or baseline(facts)
    if start is None or facts.ceilings is None or (fields and start.recorded is not None):
        return None
    try:
        other = changed(start.workload, levers, **fields)
        then = start.time_of(other)
    except FlopwiseError:
        return None
    now, scale = start.now, start.scale
    # A step that may wait for its host says nothing about the time it takes without one.
    unbound = other.recipe.graph == "on" != start.workload.recipe.graph and now.host_ns > HOST_MATTERS * now.gpu_ns
    saving_ns = now.wall_ns * scale - then.wall_ns * (1.0 if unbound else scale)
    what = ", ".join(f"{name} = {value}" for name, value in (levers or fields).items())
    capped = ", matmul and attention slowed by the power cap" if start.power else ""
    return PredictedChange(
        now=now,
        then=then,
        saving_ns=saving_ns,
        gpu_saving_ns=(now.gpu_ns - then.gpu_ns) * scale,
        arithmetic=f"model of the step: {_describe(now)} now, {_describe(then)} with {what}: "
        f"{_difference(now, then, scale, unbound)} = {units.duration(saving_ns)} "
        f"(ceilings {facts.ceilings.how}; corrected by what was measured: {start.corrections.describe()}{capped})",
    )


def changed(workload: Workload, levers: Mapping[str, str], **fields: Any) -> Workload:
    """The workload with other levers and fields."""
    recipe = recipe_from(msgspec.structs.asdict(workload.recipe) | dict(levers))
    return msgspec.structs.replace(workload, recipe=recipe, **fields)


def saved_bytes(facts: Facts, levers: Mapping[str, str]) -> int:
    """What levers take off the predicted peak; 0 where it cannot be predicted."""
    if facts.workload is None:
        return 0
    try:
        now, then = (peak_bytes(work, facts.gpu) for work in (facts.workload, changed(facts.workload, levers)))
    except FlopwiseError:  # the levers do not go together
        return 0
    return max(0, now - then) if now is not None and then is not None else 0


def largest_batch(facts: Facts) -> int:
    """The largest batch that is predicted to fit; 0 where it cannot be predicted."""
    if facts.workload is None or facts.gpu is None or facts.gpu.memory_bytes is None or facts.model is None:
        return 0
    try:
        return fit.largest_batch(facts.workload, facts.gpu.memory_bytes, facts.gpu)
    except FlopwiseError:
        return 0


def products_ns(facts: Facts, sides: set[int]) -> float:
    """The predicted time of the products that have one of these sizes among their sides."""
    step = predict_quickly(facts.workload, Machine(gpu=facts.gpu)) if facts.workload is not None else None
    if step is None or facts.ceilings is None:
        return 0.0
    ops = [op for op in step.ops if op.kind == MATMUL]
    return sum(op_time(op, facts.ceilings).ns for op in ops if sides & set(matmul_shape(op)[1:]))


def pause_ns(waterfall: Waterfall, step: StepTime) -> float:
    """How long the GPU paused before each kernel that was queued, in a step of so many kernels."""
    return sum(part.by_class.get(BETWEEN, 0.0) for part in waterfall.parts) / max(1, _kernels(step))


def _pause_ns(facts: Facts, workload: Workload, plain: StepTime) -> float:
    """By the step's trace; without one, or of a graph, what is known of the machine."""
    if facts.explanation is None or facts.waterfall is None or workload.recipe.graph == "on":
        return facts.ceilings.pause_ns if facts.ceilings is not None else 0.0
    return pause_ns(facts.waterfall, plain)


def _kernels(step: StepTime) -> int:
    return sum(phase.kernels for phase in step.phases)


def corrected(ceilings: Ceilings, by: Corrections, precision: str) -> Ceilings:
    """The machine that the step was measured on, as slow as it was; other precisions' matmuls stay at their ceilings."""

    def attention(curves: Mapping[str, Curve]) -> dict[str, Curve]:
        return {k: _slower(c, by.attention) if k.startswith(precision) else c for k, c in curves.items()}

    def matmul(key: str, limits: Matmul) -> Matmul:
        return _slower_matmul(limits, by.matmul) if key.partition(",")[0] == precision else limits

    phases = dict.fromkeys((*ceilings.host, *by.host))
    return msgspec.structs.replace(
        ceilings,
        matmul={key: matmul(key, limits) for key, limits in ceilings.matmul.items()},
        memory={k: _slower(curve, by.rest) for k, curve in ceilings.memory.items()},
        attention=attention(ceilings.attention),
        attention_backward=attention(ceilings.attention_backward),
        host={phase: _slower_host(ceilings.host_cost(phase), by.host.get(phase, 1.0)) for phase in phases},
        backward_start_ns=ceilings.backward_start_ns * by.host.get("backward", 1.0),
        compiled_call_ns=ceilings.compiled_call_ns * by.host.get("forward", 1.0),
        compiled={phase: _slower_host(cost, by.host.get(phase, 1.0)) for phase, cost in ceilings.compiled.items()},
    )


def _slower(curve: Curve, factor: float) -> Curve:
    return Curve(amount=curve.amount, ns=tuple(ns * factor for ns in curve.ns))


def _slower_matmul(limits: Matmul, factor: float) -> Matmul:
    tiles = tuple(
        Tile(m=t.m, n=t.n, start_ns=t.start_ns * factor, flops_per_s=t.flops_per_s / factor) for t in limits.tiles
    )
    return msgspec.structs.replace(
        limits, peak_flops=limits.peak_flops / factor, tiles=tiles, join_ns=limits.join_ns * factor
    )


def _slower_host(cost: HostCost, factor: float) -> HostCost:
    return HostCost(**{name: ns * factor for name, ns in msgspec.structs.asdict(cost).items() if ns is not None})


def _corrections(facts: Facts, workload: Workload, plain: StepTime, capped: bool) -> Corrections:
    gpu_ns, host = facts.gpu_ns, {} if capped else _host(facts, workload, plain)
    if not gpu_ns or not plain.gpu_ns:
        return Corrections(host=host)
    if facts.explanation is None:
        if capped:
            return Corrections()
        pause = facts.ceilings.pause_ns if facts.ceilings is not None and workload.recipe.graph != "on" else 0.0
        every = _bounded((gpu_ns - pause * _kernels(plain)) / plain.gpu_ns)  # the GPU's clock includes the pauses
        return Corrections(host=host, matmul=every, attention=every, rest=every)
    taken = {share.name: share.gpu_ns for share in facts.explanation.classes}
    matmul, attention, rest = (
        _bounded(measured / predicted) if measured and predicted else 1.0
        for measured, predicted in zip(_by_group(taken), _by_group(plain.gpu_ns_by_kind), strict=True)
    )
    if capped:  # what the cap takes from matmuls and attention depends on the rest
        return Corrections(rest=rest)
    return Corrections(host=host, matmul=matmul, attention=attention, rest=rest)


def _by_group(times: Mapping[str, float]) -> tuple[float, float, float]:
    """Matmuls, attention, and everything else."""
    rest = sum(ns for kind, ns in times.items() if kind not in (MATMUL, ATTENTION))
    return times.get(MATMUL, 0.0), times.get(ATTENTION, 0.0), rest


def _is_capped(facts: Facts, plain: StepTime) -> bool:
    """Whether the power cap slows the step. The host's clock then includes its waiting for the GPU."""
    by_gpu = plain.host_ns < HOST_MATTERS * plain.gpu_ns
    return by_gpu and facts.point is not None and held_clock(facts.point.telemetry) is not None


def _host(facts: Facts, workload: Workload, plain: StepTime) -> dict[str, float]:
    """By phase, where phases were timed one by one, else of the whole step alike."""
    if facts.point is None or workload.recipe.graph == "on":
        return {}
    timed = {phase.phase: facts.point.times(phase.phase) for phase in plain.phases}
    if any(timed.values()):
        factors = {p.phase: _host_factor(timed[p.phase], p.host_ns, p.gpu_ns, p.kernels) for p in plain.phases}
    else:
        factors = dict.fromkeys(timed, _host_factor(facts.times, plain.host_ns, plain.gpu_ns, _kernels(plain)))
    found = _no_more_than(facts.details.host_ns, plain, {phase: factor for phase, factor in factors.items() if factor})
    if list(timed) == ["forward"] and "forward" in found:
        found["inference"] = found["forward"]
    return found


def _no_more_than(most_ns: float | None, plain: StepTime, factors: dict[str, float]) -> dict[str, float]:
    """The factors, all smaller where the host would be busy for longer than in a trace, which slows it."""
    total = sum(phase.host_ns * factors.get(phase.phase, 1.0) for phase in plain.phases)
    if most_ns is None or total <= most_ns:
        return factors
    return {phase.phase: _bounded(factors.get(phase.phase, 1.0) * most_ns / total) for phase in plain.phases}


def _host_factor(times: PhaseTimes | None, host_ns: float, gpu_ns: float, kernels: int) -> float | None:
    """The host's time over what was predicted; None where the host waited for the GPU, and its clock with it."""
    if times is None or not times.launch_ns or not times.wall_ns or not host_ns:
        return None
    launching, wall = median(times.launch_ns), median(times.wall_ns)
    held = [ns for ns, was_held in zip(times.gpu_ns, times.gpu_held, strict=False) if was_held]
    busy = median(held) if held else gpu_ns
    if busy >= GPU_BOUND * wall or (kernels > LAUNCH_QUEUE and launching < HOST_BOUND * wall):
        return None
    return _bounded(launching / host_ns)


def _bounded(factor: float) -> float:
    return min(WIDEST_CORRECTION, max(1 / WIDEST_CORRECTION, factor))


def _describe(time: StepTime) -> str:
    return f"{units.duration(time.wall_ns)} (GPU {units.duration(time.gpu_ns)}, host {units.duration(time.host_ns)})"


def _difference(now: StepTime, then: StepTime, scale: float, unbound: bool) -> str:
    before, after = units.duration(now.wall_ns), units.duration(then.wall_ns)
    if abs(scale - 1) < 0.005:
        return f"{before} − {after}"
    return (
        f"{before} × {scale:.2f} as measured − {after}"
        if unbound
        else f"{before} − {after}, × {scale:.2f} as measured,"
    )


@lru_cache(maxsize=64)
def _cost(workload: bytes, gpu: str, recorded: RecordedStep | None = None) -> Prediction:
    """Rules ask for the same steps again and again; a workload holds tables, so its JSON stands for it."""
    machine = Machine(gpu=gpu_named(gpu) if gpu else None)
    return predict(msgspec.json.decode(workload, type=Workload), machine, recorded=recorded)
