"""An account on one screen: the step's time where a GPU is named and it fits, else its memory."""

from collections.abc import Sequence

from flopwise import units
from flopwise.analysis.clocks import step_work
from flopwise.analysis.reach import Reach, after, limit
from flopwise.predict.account import Account, GpuAccount, total_row
from flopwise.predict.fit import LeverEffect, memory_levers
from flopwise.predict.flops import TrainingTime
from flopwise.predict.machine import machine_with
from flopwise.predict.op_time import LAUNCH
from flopwise.predict.plain_levers import LeverSaving, predicted_levers
from flopwise.predict.prediction import derived_levers
from flopwise.predict.step_time import StepTime
from flopwise.render.actions import action
from flopwise.render.findings_view import options
from flopwise.render.screen import (
    IDLE,
    LIMIT,
    MEASURED,
    MOST_CHANGES,
    NOW,
    PREDICTED,
    REACHABLE,
    SPECIFIED,
    Change,
    Figure,
    Part,
    Screen,
    changes_title,
    reach_figures,
)
from flopwise.spec.workload import Workload
from flopwise.work.operation import OWNERS

_BOUND = {"compute": "its FLOPs", "bandwidth": "memory bandwidth", "launch": "the CPU, which launches too late"}
_SHORT = "its kernels, most of them as short as kernels are"


def account_screen(a: Account) -> Screen:
    """Of the first GPU that is named."""
    first = next(iter(a.gpus), None)
    if first is None or first.time is None or first.fits is False:
        return _memory(a, first)
    return _time(a, first, first.time)


def _time(a: Account, one: GpuAccount, time: StepTime) -> Screen:
    now_ns, (found, best) = a.measured_ns or time.wall_ns, _reached(a, one, time)
    now = Figure(NOW, now_ns, MEASURED if a.measured_ns else PREDICTED, note="as given" if a.measured_ns else "not run")
    figures = (_with_mfu(now, found), *reach_figures(found))
    by = _BOUND.get(time.bound, time.bound) if time.bound != LAUNCH or time.gpu_ns < time.wall_ns else _SHORT
    bound = f", bound by {by}" if time.bound else ""
    return Screen(
        title=a.workload.label(),
        where=one.gpu.title,
        verdict=f"{_days(a)}{_whose(a)} takes about {units.duration(time.wall_ns)}, predicted{bound}. "
        f"{_fits(one, a.workload)}",
        figures=figures,
        parts_title=f"Where the predicted {units.duration(time.wall_ns)} go",
        parts=_time_parts(time),
        changes_title=changes_title(len(best)),
        changes=tuple(
            Change(action(c.lever, c.value), ns, options({c.lever: c.value})) for c, ns in best[:MOST_CHANGES]
        ),
        notes=_notes(a),
    )


def account_reach(a: Account, one: GpuAccount) -> Reach | None:
    """The step on a GPU: now, with all levers of plain PyTorch that save time, and at its limit."""
    return _reached(a, one, one.time)[0] if one.time is not None else None


def _reached(a: Account, one: GpuAccount, time: StepTime) -> tuple[Reach, list[tuple[LeverSaving, float]]]:
    now_ns = a.measured_ns or time.wall_ns
    scale = now_ns / time.wall_ns if time.wall_ns else 1.0
    levers = one.levers or predicted_levers(a.workload, machine_with(one.gpu), time.wall_ns)
    best = [(c, scale * c.saving_ns) for c in levers]
    dtype, work = a.workload.recipe.linear if a.flops else one.compute_dtype, step_work(a.workload, None)
    most = limit(work.flops if a.workload.generates else one.useful_flops, dtype, one.gpu.name, work.least_bytes)
    return after(most, now_ns, [saving_ns for _, saving_ns in best]), best


def _with_mfu(now: Figure, found: Reach) -> Figure:
    return Figure(now.name, now.amount, now.how, found.mfu(now.amount), now.note)


def _time_parts(time: StepTime) -> tuple[Part, ...]:
    """GPU time by class of op, and what the GPU waits for launches."""
    idle = Part("idle: late launches", max(0.0, time.wall_ns - time.gpu_ns), IDLE)
    kinds = sorted(time.gpu_ns_by_kind.items(), key=lambda item: -item[1])
    return (*(Part(kind, ns) for kind, ns in kinds), *([idle] if idle.amount > 1 else []))


def _fits(one: GpuAccount, workload: Workload) -> str:
    without = " and ".join(derived_levers(workload))
    peak = units.size(one.step.peak_bytes) + (f" (without {without})" if without else "")
    if one.fits is None or one.gpu.memory_bytes is None:
        return f"Its peak memory is {peak}."
    larger = f"; the largest batch is {one.largest_batch}" if one.largest_batch else ""
    return (
        f"Its peak of {peak} {'fits' if one.fits else 'does not fit'} into {units.size(one.gpu.memory_bytes)}{larger}."
    )


def _memory(a: Account, one: GpuAccount | None) -> Screen:
    """Without a GPU that it fits: who holds the peak, and what lowers it."""
    step = one.step if one is not None else a.step
    effects = best_effects(memory_levers(a.workload, one.gpu if one is not None else None, quick=True))
    figures = [Figure(NOW, step.peak_bytes, PREDICTED, note=f"its peak, in {step.peak.phase}")]
    figures += [Figure(REACHABLE, effects[0].peak_bytes, PREDICTED, note="with change 1 alone")] if effects else []
    if one is not None and one.gpu.memory_bytes is not None:
        figures.append(Figure(LIMIT, one.gpu.memory_bytes, SPECIFIED, note=one.gpu.title))
    ask = "" if one is not None else "Its time and what fits: --gpu h200"
    return Screen(
        title=a.workload.label(),
        where=one.gpu.title if one is not None else "",
        verdict=f"{_days(a)}{work_in_words(a)} {_fits(one, a.workload) if one is not None else ''}".strip(),
        unit="bytes",
        figures=tuple(figures),
        parts_title=f"Who holds the {units.size(step.peak_bytes)}",
        parts=tuple(Part(owner, step.peak.owners[owner]) for owner in OWNERS if step.peak.owners.get(owner)),
        changes_title="What lowers the peak (predicted, each alone)" if effects else "",
        changes=effect_changes(effects),
        notes=tuple(filter(None, (ask, *_others(a), *a.notes))),
    )


def best_effects(effects: Sequence[LeverEffect]) -> list[LeverEffect]:
    """The levers that take most off the peak, each with its best value."""
    best: dict[str, LeverEffect] = {}
    for effect in sorted(effects, key=lambda one: -one.saved_bytes):
        if effect.saved_bytes > 0 and effect.levers:
            best.setdefault(next(iter(effect.levers)), effect)
    return list(best.values())[:MOST_CHANGES]


def effect_changes(effects: Sequence[LeverEffect]) -> tuple[Change, ...]:
    """The same for a screen."""
    return tuple(
        Change(action(*next(iter(effect.levers.items()))), effect.saved_bytes, options(effect.levers))
        for effect in effects
    )


def work_in_words(a: Account) -> str:
    """Parameters and FLOPs."""
    flops = a.flops.total if a.flops is not None else total_row(a.rows).flops
    model = f"{units.count(a.parameters)} parameters. " if a.parameters else ""
    tokens = f" over {units.count(a.workload.batch * a.workload.context)} tokens" if a.flops is not None else ""
    return f"{model}A step does {units.rate(flops, 'FLOP')}{tokens}." if flops else model.strip()


def _whose(a: Account) -> str:
    return "A step" if a.workload.recipe.parallel == "off" else "A rank's own part of a step"


def _notes(a: Account) -> tuple[str, ...]:
    more = (*_training(a), *_others(a), work_in_words(a))
    return (*more, *a.notes) if a.workload.recipe.parallel == "off" else (*a.notes, *more)


def _training(a: Account) -> list[str]:
    """Tokens per second to serve, where that was asked for."""
    served = [part for one in a.gpus[:1] for part in one.inference]
    return [f"{part.part}: at most {units.count(part.tokens_per_s)} tokens/s" for part in served]


def _days(a: Account) -> str:
    """Days to train, where that was asked for; the last is counted, the one before it is by the rule, in the same dtype."""
    found = [t for one in a.gpus[:1] for t in one.training]
    if len(found) < 2:
        return ""
    rule, counted = found[-2:]
    return f"{training_words(counted)} ({units.days(rule.days)} by {rule.rule}). "


def training_words(t: TrainingTime) -> str:
    """`Training takes 144 days: 15T tokens on 1,024 GPUs at 50 % MFU in bf16`."""
    asked = f"{units.count(t.tokens)} tokens on {t.gpus:,} GPUs at {units.percent(t.mfu, 0)} MFU in {t.dtype}"
    return f"Training takes {units.days(t.days)}: {asked}"


def training_screen(parameters: float, run: TrainingTime, where: str) -> Screen:
    """A training run of a model of which only the size is known."""
    return Screen(
        title=f"{units.count(parameters)} parameters",
        where=where,
        verdict=f"{training_words(run)}, by {run.rule}.",
        notes=(
            f"{run.flops:.2e} FLOPs, {units.count(run.gpu_hours)} GPU-hours. A forward pass is 2 FLOPs per parameter and token, "
            "a backward pass 4; attention's own FLOPs are left out.",
            "With a model they are counted: flopwise account llama3-70b --gpu h100 --tokens 15T",
        ),
        more="",
    )


def _others(a: Account) -> list[str]:
    lines = []
    for one in a.gpus[1:]:
        time = f"{units.duration(one.time.wall_ns)} a step, predicted" if one.time is not None else "no time predicted"
        lines.append(f"{one.gpu.title}: {time}{'' if one.fits is not False else '; it does not fit'}")
    return lines
