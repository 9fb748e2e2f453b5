"""What a lever would save, by the model that predicts steps: the workload accounted for with the lever changed.

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
from flopwise.advice import measured, power
from flopwise.advice.facts import Facts
from flopwise.analysis.idle import BETWEEN
from flopwise.analysis.power_cap import held_clock
from flopwise.errors import FlopwiseError
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import Prediction, peak_bytes, predict
from flopwise.predict.step_time import StepTime
from flopwise.records.ceilings import Ceilings, Curve, HostCost, Matmul, Tile
from flopwise.records.run import PhaseTimes
from flopwise.records.waterfall import Waterfall
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import recipe_from
from flopwise.spec.workload import Workload
from flopwise.work.operation import ATTENTION, MATMUL

_WIDEST = 3.0  # a correction beyond this, up or down, is of another step, or of a clock that measured something else
_HOST_BUSY = 0.75  # of the GPU's time: where the host is so busy, the step may wait for it, whatever the clock does
_GPU_BOUND = 0.95  # of the step the GPU is at work: the host's clock then holds its waiting for a full queue
_QUEUE = 1000  # kernels, about: a host that is so far ahead of the GPU has to wait
_HOST_BOUND = 0.9  # of the step the host launches: it did not wait, whatever the GPU does


class Corrections(msgspec.Struct, frozen=True, kw_only=True):
    """Measured over predicted, of the step as it is."""

    host: dict[str, float] = {}  # by phase; 1 where the clock says nothing
    matmul: float = 1.0  # of the precision used
    attention: float = 1.0
    rest: float = 1.0


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it is and as it would be, both by the corrected model; `saving_ns` is of the measured step."""

    now: StepTime
    then: StepTime
    corrections: Corrections
    saving_ns: float
    gpu_saving_ns: float  # less work for the GPU, whether the step gets shorter by it or not
    arithmetic: str


def predicted_saving(facts: Facts, levers: Mapping[str, str]) -> tuple[float, str] | None:
    """The saving of changed levers and how it was reckoned; None where the workload or the machine is not known."""
    found = predicted_step(facts, levers)
    return (found.saving_ns, found.arithmetic) if found is not None else None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it is: what is the same whichever lever is thought of."""

    workload: Workload
    gpu: str
    corrections: Corrections
    limits: Ceilings  # corrected
    now: StepTime
    scale: float  # measured over `now`
    strength: float | None = None  # where the power cap slows the step, see `power`


_last: tuple[Facts, Standing | None] | None = None  # facts hold tables, so that no cache can take them for a key


def standing(facts: Facts) -> Standing | None:
    """None where the workload is not known, or no ceilings are. Rules ask for that of the same facts again and again."""
    global _last
    if _last is None or _last[0] is not facts:
        _last = (facts, _standing(facts))
    return _last[1]


def _standing(facts: Facts) -> Standing | None:
    workload, gpu = measured.workload_of(facts), measured.gpu_of(facts)
    if workload is None or facts.ceilings is None or measured.model_of(facts) is None:
        return None
    name = gpu.name if gpu is not None else ""
    try:
        cost = _cost(_key(workload), name)
    except FlopwiseError:
        return None
    plain, known = cost.time_with(facts.ceilings), measured.untraced_ns(facts)
    capped = _is_capped(facts, plain)
    corrections = _corrections(facts, workload, plain, capped)
    limits = corrected(facts.ceilings, corrections, _precision(workload))
    limits = msgspec.structs.replace(limits, pause_ns=_pause_ns(facts, workload, plain))
    now = cost.time_with(limits)
    strength = power.strength(now, known) if known and capped else None
    now = power.slowed(now, strength)
    scale = _within(known / now.wall_ns) if known else 1.0
    return Standing(
        workload=workload, gpu=name, corrections=corrections, limits=limits, now=now, scale=scale, strength=strength
    )


def _pause_ns(facts: Facts, workload: Workload, plain: StepTime) -> float:
    """What lay before a kernel that was queued, by the step's trace; without one, or of a graph, what is known of the machine."""
    known = facts.ceilings.pause_ns if facts.ceilings is not None else 0.0
    if facts.explanation is None or facts.waterfall is None or workload.recipe.graph == "on":
        return known
    return pause_ns(facts.waterfall, plain)


def pause_ns(waterfall: Waterfall, step: StepTime) -> float:
    """How long the GPU paused before a kernel that was queued, in a step of so many kernels."""
    return sum(part.by_class.get(BETWEEN, 0.0) for part in waterfall.parts) / max(1, _kernels(step))


def _kernels(step: StepTime) -> int:
    return sum(phase.kernels for phase in step.phases)


def with_layers(here: Standing, n_layers: int) -> Standing | None:
    """The same step of a model with so many layers, on the machine as it was measured; None where that is not known."""
    subject = here.workload.subject
    if not isinstance(subject, ModelSpec):
        return None
    workload = msgspec.structs.replace(here.workload, subject=msgspec.structs.replace(subject, n_layers=n_layers))
    now = power.slowed(_cost(_key(workload), here.gpu).time_with(here.limits), here.strength)
    return msgspec.structs.replace(here, workload=workload, now=now)


def predicted_step(
    facts: Facts, levers: Mapping[str, str], here: Standing | None = None, **fields: Any
) -> Predicted | None:
    """The step with levers changed, and with `fields` of the workload (`batch=8`, `subject=…`) changed.

    None where the workload is not known, no ceilings are, or the levers do not go together. `here`: what `standing` said.
    """
    here = here or standing(facts)
    if here is None or facts.ceilings is None:
        return None
    try:
        other = changed(here.workload, levers, **fields)
        cost = _cost(_key(other), here.gpu)
    except FlopwiseError:
        return None
    corrections, now, scale = here.corrections, here.now, here.scale
    then = power.slowed(cost.time_with(here.limits), here.strength)
    # A step that may wait for its host says nothing of the time it takes without one.
    freed = other.recipe.graph == "on" != here.workload.recipe.graph and now.host_ns > _HOST_BUSY * now.gpu_ns
    saving = now.wall_ns * scale - then.wall_ns * (1.0 if freed else scale)
    what = ", ".join(f"{k} = {v}" for k, v in levers.items()) or ", ".join(f"{k} = {v}" for k, v in fields.items())
    arithmetic = (
        f"model of the step: {_told(now)} now, {_told(then)} with {what}: "
        f"{_minus(now, then, scale, freed)} = {units.duration(saving)} "
        f"(ceilings {facts.ceilings.how}; corrected by what was measured: host {_by_phase(corrections.host)}, "
        f"matmul × {corrections.matmul:.2f}, attention × {corrections.attention:.2f}, rest × {corrections.rest:.2f}"
        f"{', matmul and attention slower by what the power cap takes' if here.strength else ''})"
    )
    return Predicted(
        now=now,
        then=then,
        corrections=corrections,
        saving_ns=saving,
        gpu_saving_ns=(now.gpu_ns - then.gpu_ns) * scale,
        arithmetic=arithmetic,
    )


def changed(workload: Workload, levers: Mapping[str, str], **fields: Any) -> Workload:
    """The workload with other levers and fields."""
    recipe = recipe_from(msgspec.structs.asdict(workload.recipe) | dict(levers))
    return msgspec.structs.replace(workload, recipe=recipe, **fields)


def saved_bytes(facts: Facts, levers: Mapping[str, str]) -> int:
    """What levers take off the peak by prediction, at least 0; 0 where the workload is not known."""
    workload = measured.workload_of(facts)
    if workload is None or measured.model_of(facts) is None:
        return 0
    gpu = measured.gpu_of(facts)
    try:
        return max(0, (peak_bytes(workload, gpu) or 0) - (peak_bytes(changed(workload, levers), gpu) or 0))
    except FlopwiseError:
        return 0


def corrected(ceilings: Ceilings, by: Corrections, precision: str) -> Ceilings:
    """The machine that the step was measured on, as slow as it was; other precisions' matmuls stay at their ceilings."""

    def attention(curves: Mapping[str, Curve]) -> dict[str, Curve]:
        return {k: _slower(c, by.attention) if k.startswith(precision) else c for k, c in curves.items()}

    phases = dict.fromkeys((*ceilings.host, *by.host))
    return msgspec.structs.replace(
        ceilings,
        matmul={
            k: _slower_matmul(m, by.matmul) if k.partition(",")[0] == precision else m
            for k, m in ceilings.matmul.items()
        },
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
    known = {name: ns for name, ns in msgspec.structs.asdict(cost).items() if ns is not None}
    return HostCost(**{name: ns * factor for name, ns in known.items()})


def _corrections(facts: Facts, workload: Workload, plain: StepTime, capped: bool) -> Corrections:
    gpu, host = measured.gpu_ns(facts), {} if capped else _host(facts, workload, plain)
    if not gpu or not plain.gpu_ns:
        return Corrections(host=host)
    e, by_kind = facts.explanation, plain.gpu_ns_by_kind
    if e is None and capped:
        return Corrections()
    if e is None:  # its clock holds the pauses
        pauses_ns = (
            facts.ceilings.pause_ns * _kernels(plain) if facts.ceilings and workload.recipe.graph != "on" else 0.0
        )
        every = _within((gpu - pauses_ns) / plain.gpu_ns)
        return Corrections(host=host, matmul=every, attention=every, rest=every)
    taken = {share.name: share.gpu_ns for share in e.classes}

    def one(kind: str) -> float:
        return _within(taken[kind] / by_kind[kind]) if taken.get(kind) and by_kind.get(kind) else 1.0

    def others(times: Mapping[str, float]) -> float:
        return sum(ns for kind, ns in times.items() if kind not in (MATMUL, ATTENTION))

    rest = _within(others(taken) / others(by_kind)) if others(taken) and others(by_kind) else 1.0
    if capped:  # what it takes from matmuls and attention depends on the rest
        return Corrections(rest=rest)
    return Corrections(host=host, matmul=one(MATMUL), attention=one(ATTENTION), rest=rest)


def _is_capped(facts: Facts, plain: StepTime) -> bool:
    """Whether the power cap slows the step. The host's clock then holds its waiting for the GPU."""
    by_gpu = plain.host_ns < _HOST_BUSY * plain.gpu_ns
    return by_gpu and facts.point is not None and held_clock(facts.point.telemetry) is not None


def _host(facts: Facts, workload: Workload, plain: StepTime) -> dict[str, float]:
    """By phase, where phases were timed one by one, else of the whole step alike."""
    if facts.point is None or workload.recipe.graph == "on":
        return {}
    phases = [phase.phase for phase in plain.phases]
    timed = {phase: facts.point.times(phase.phase) for phase in plain.phases}
    if all(times is None for times in timed.values()):
        whole = _dictated(facts.point.times(), plain.host_ns, plain.gpu_ns, _kernels(plain))
        found = dict.fromkeys(phases, whole) if whole else {}
    else:
        each = {
            phase.phase: _dictated(times, phase.host_ns, phase.gpu_ns, phase.kernels) for phase, times in timed.items()
        }
        found = {phase: factor for phase, factor in each.items() if factor}
    if phases == ["forward"] and "forward" in found:
        found["inference"] = found["forward"]
    return found


def _dictated(times: PhaseTimes | None, host_ns: float, gpu_ns: float, kernels: int) -> float | None:
    """The host's time over what was predicted; None where the GPU dictated: the host then waits for the queue, its clock too."""
    if times is None or not times.launch_ns or not times.wall_ns or not host_ns:
        return None
    launching, wall = median(times.launch_ns), median(times.wall_ns)
    held = [ns for ns, was_held in zip(times.gpu_ns, times.gpu_held, strict=False) if was_held]
    busy = median(held) if held else gpu_ns
    if busy >= _GPU_BOUND * wall or (kernels > _QUEUE and launching < _HOST_BOUND * wall):
        return None
    return _within(launching / host_ns)


def _by_phase(factors: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} × {factor:.2f}" for phase, factor in factors.items()) or "× 1.00"


def _within(factor: float) -> float:
    return min(_WIDEST, max(1 / _WIDEST, factor))


def _precision(workload: Workload) -> str:
    return workload.recipe.compute


def _told(time: StepTime) -> str:
    return f"{units.duration(time.wall_ns)} (GPU {units.duration(time.gpu_ns)}, host {units.duration(time.host_ns)})"


def _minus(now: StepTime, then: StepTime, scale: float, freed: bool) -> str:
    before, after = units.duration(now.wall_ns), units.duration(then.wall_ns)
    if abs(scale - 1) < 0.005:
        return f"{before} − {after}"
    return (
        f"{before} × {scale:.2f} as measured − {after}" if freed else f"{before} − {after}, × {scale:.2f} as measured,"
    )


def _key(workload: Workload) -> bytes:
    return msgspec.json.encode(workload)


@lru_cache(maxsize=64)
def _cost(workload: bytes, gpu: str) -> Prediction:
    """Rules ask for the same steps again and again; a workload holds tables, so its JSON stands for it."""
    return predict(msgspec.json.decode(workload, type=Workload), Machine(gpu=gpu_named(gpu) if gpu else None))
