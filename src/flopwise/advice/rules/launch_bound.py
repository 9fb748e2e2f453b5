"""The GPU waits for the host to launch its work.

Looks for: GPU idle because the next kernel had not been launched yet, for 5 % of the step or more; without a trace, a step
that takes longer than the GPU's own work while the host is busy all the time.
Saving: the step replayed as one CUDA graph, by the model; from a trace alone the idle time by late launches (of the untraced
step where its clock is known), as a graph leaves none.
Mend: capture the step in a CUDA graph, or compile it with `mode="reduce-overhead"`; fewer, larger kernels help as well.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Saving, finding, reckoned
from flopwise.analysis.idle import LATE_LAUNCH
from flopwise.records.finding import HIGH, MEDIUM, Finding
from flopwise.records.waterfall import IDLE_LAUNCH, IDLE_OTHER

LEAST = 0.05  # of the step
LEVERS = {"graph": "on"}
CODE = """graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):      # after three warm-up steps on a side stream, with static inputs
    loss = train_step(tokens, targets)
# each step: tokens.copy_(next_tokens); targets.copy_(next_targets); graph.replay()
# or: torch.compile(model, mode="reduce-overhead")"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    recipe, step = measured.recipe_of(facts), measured.step_ns(facts)
    if not step or (recipe is not None and recipe.graph == "on"):
        return None
    late = _late_ns(facts)
    if late < LEAST * step:
        return None
    untraced = measured.untraced_ns(facts) is not None
    arithmetic = (
        f"idle by late launches {units.duration(late)} of {units.duration(step)}: a replayed graph has none of it"
    )
    saving = reckoned(facts, LEVERS, late, arithmetic)
    if saving.arithmetic.startswith(arithmetic):  # from the trace: what is freed here is the step's own time
        sure = HIGH if untraced else MEDIUM
        saving = Saving(alone_ns=late, freed_ns=late, arithmetic=arithmetic, confidence=sure)
    title = f"launch-bound: the GPU waits {units.duration(late)} of {units.duration(step)} for launches"
    evidence = _evidence(facts)
    parts = (IDLE_LAUNCH, IDLE_OTHER)
    return finding(facts, __name__, title, saving, parts, evidence=evidence, levers=LEVERS, code=CODE)


def _late_ns(facts: Facts) -> float:
    if facts.explanation is not None:
        return measured.idle_ns(facts, LATE_LAUNCH)
    step, gpu, host = measured.untraced_ns(facts), measured.gpu_ns(facts), measured.launch_ns(facts)
    if step is None or gpu is None or host is None or host < gpu:
        return 0.0
    return max(0.0, step - gpu)


def _evidence(facts: Facts) -> tuple[str, ...]:
    lines = []
    if facts.explanation is not None:
        e = facts.explanation
        lines.append(
            f"{e.launches:.0f} launches a step; kernels of {units.duration(e.busy_ns / max(e.launches, 1))} each"
        )
        if e.untraced_idle is None:
            lines.append("of the traced step: a profiler slows the host, and the step alone may wait less")
    host = measured.launch_ns(facts)
    if host is not None:
        lines.append(f"the host is busy for {units.duration(host)} of each step (measured without a profiler)")
    return tuple(lines)
