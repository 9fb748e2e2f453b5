"""The GPU waits for the host to launch its work.

Looks for: GPU idle because the next kernel had not been launched yet, for {LAUNCH_BOUND_SHARE:%} of the step or more; without
a trace, a step that takes longer than the GPU's own work while the host is busy all the time. Where the untraced step is an
estimate, the share must hold at its optimistic end, too. Not where CUDA graphs run {REPLAYED_SHARE:%} of the GPU time already.
Saving: the step replayed as one CUDA graph, by the model; from a trace alone the untraced step's idle time by late launches,
as a graph leaves none.
Fix: capture the step in a CUDA graph, or compile it with `mode="reduce-overhead"` (`--compile reduce-overhead`), which also takes
steps that read numbers on the host; fewer, larger kernels help as well: a fused optimizer, fused projections and norms.
"""

import msgspec

from flopwise import units
from flopwise.advice.constants import LAUNCH_BOUND_SHARE
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import predicted_change
from flopwise.advice.savings import Rule, idle_saved, predicted_or
from flopwise.analysis.idle import LATE_LAUNCH
from flopwise.analysis.verdict import BOUND
from flopwise.records.finding import HIGH, MEDIUM, Finding
from flopwise.records.waterfall import IDLE_LAUNCH, IDLE_OTHER
from flopwise.spec.recipe import REPLAYED, SCALES_ON_DEVICE

CODE = """graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):      # after three warm-up steps on a side stream, with static inputs
    loss = train_step(tokens, targets)
# each step: tokens.copy_(next_tokens); targets.copy_(next_targets); graph.replay()
# or: torch.compile(model, mode="reduce-overhead")"""
CODE_INFERENCE = """graph = torch.cuda.CUDAGraph()
with torch.inference_mode(), torch.cuda.graph(graph):      # after three warm-up calls on a side stream
    out = model(tokens)
# each call: tokens.copy_(next_tokens); graph.replay(); use out
# or: torch.compile(model, mode="reduce-overhead")"""
_FEWER_OPS = {"optimizer": "fused", "projections": "fused", "norm": "triton", "activation": "triton", "rope": "triton"}
RULE = Rule(__name__, (IDLE_LAUNCH, IDLE_OTHER), {"graph": "on"}, CODE)


def check(facts: Facts) -> Finding | None:
    step, late = facts.step_ns, _late_ns(facts)
    share = min(_sure_share(facts), late / step) if step else 0.0
    captured = facts.replays or (facts.recipe is not None and facts.recipe.graph == "on")
    if share < LAUNCH_BOUND_SHARE or captured:
        return None
    arithmetic = f"idle by late launches {units.duration(late)} of {units.duration(step)}: a replayed graph has none"
    # From a trace alone, what is freed here is the step's own time.
    traced = idle_saved(late, arithmetic, HIGH if facts.untraced_ns is not None else MEDIUM)
    e = facts.explanation
    is_bound = e.launch_bound if e is not None else share >= BOUND
    bound = "launch-bound: " if is_bound else ""  # as the verdict says it
    title = f"{bound}the GPU waits {units.duration(late)} of {units.duration(step)} for launches"
    saving = predicted_or(facts, RULE.levers, traced)
    rule = RULE if facts.trains else msgspec.structs.replace(RULE, code=CODE_INFERENCE)
    lines = (*evidence(facts), *_without_a_graph(facts))
    return rule.finding(facts, title, saving, lines, evidence_ns=late, late_ns=late, step_ns=step)


def _without_a_graph(facts: Facts) -> list[str]:
    """What is left to a step that cannot be captured whole, where it can be predicted."""
    recipe = facts.recipe
    if recipe is None:
        return []
    fewer = _FEWER_OPS if recipe.compile == "off" else {"optimizer": "fused", "projections": "fused"}
    kept = ("optimizer",) if recipe.optimizer in SCALES_ON_DEVICE else ()
    fewer = {lever: value for lever, value in fewer.items() if getattr(recipe, lever) != value and lever not in kept}
    lines = []
    for levers, what in (({"compile": REPLAYED}, "the compiler's own graphs"), (fewer, "fewer, larger ops")):
        change = predicted_change(facts, levers) if levers else None
        if change is not None and change.saving_ns > 0:
            named = " ".join(f"--{lever} {value}" for lever, value in levers.items())
            lines.append(f"without a graph, {what} would save {units.duration(change.saving_ns)} (predicted): {named}")
    return lines


def _late_ns(facts: Facts) -> float:
    if facts.explanation is not None:
        return facts.idle_ns(LATE_LAUNCH)
    step, gpu, host = facts.untraced_ns, facts.gpu_ns, facts.host_ns
    if step is None or gpu is None or host is None or host < gpu:
        return 0.0
    return max(0.0, step - gpu)


def _sure_share(facts: Facts) -> float:
    """Of the step at the optimistic end of an estimate; where it is measured, all of it counts."""
    untraced = facts.untraced_step
    if untraced is None or untraced.measured:
        return 1.0
    return facts.sure_idle_ns(LATE_LAUNCH) / untraced.low_ns


def evidence(facts: Facts) -> tuple[str, ...]:
    """Launches, and how long the host is busy with them."""
    lines, e, host, untraced = [], facts.explanation, facts.host_ns, facts.untraced_step
    if e is not None:
        each = units.duration(e.busy_ns / max(e.launches, 1))
        lines.append(f"{units.several(e.launches, 'launch')} a step; kernels of {each} each")
        if untraced is None:
            lines.append("of the traced step: a profiler slows the host, and the step alone may wait less")
        elif not untraced.measured:
            low, high = units.duration(untraced.low_ns), units.duration(untraced.high_ns)
            lines.append(
                f"the untraced step is an estimate: {low} to {high}; it is {units.duration(e.window_ns)} traced"
            )
    if host is not None:
        known = "measured without a profiler" if untraced is not None and untraced.measured else "estimated"
        lines.append(f"the host is busy for {units.duration(host)} of each step ({known})")
    return tuple(lines)
