"""When a lever is kept: faster, smaller or needed for the memory limit, and its results right."""

import math
from collections.abc import Sequence

import msgspec

from flopwise import units
from flopwise.advice.constants import ALLOWED, ALLOWED_LATER, ALLOWED_LOSS, SMALLER_SHARE
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.records.events import AgreementResult
from flopwise.records.run import (
    DECAY,
    GRADIENT,
    LOSS,
    OK,
    SCALE,
    STEP,
    UPDATE,
    Agreement,
    Difference,
    PhaseMemory,
    Point,
)
from flopwise.records.tuning import Attempt, Decision
from flopwise.statistics import level

# The keys of decisions: a comparison's verdict (FASTER, SLOWER, NO_DIFFERENCE, INCONCLUSIVE), or one of these.
SMALLER, UNDER_LIMIT, STEADIER, OVER_LIMIT = "smaller", "under limit", "steadier", "over limit"
WRONG_LOSS, WRONG_GRADIENTS, WRONG_UPDATES = "wrong loss", "wrong gradients", "wrong updates"
CHECK_FAILED, NOT_RUN = "check failed", "not run"
KEPT = (FASTER, SMALLER, UNDER_LIMIT, STEADIER)
UNCHECKED, RANDOM, OTHER_DRAWS = "unchecked", "random", "other draws"  # a kept lever's `check`

_SENTENCES = {
    SMALLER: "{saved_share:.0%} less memory, and not shown to be slower",
    UNDER_LIMIT: "smaller, as the memory limit requires",
    STEADIER: "not shown to be slower, and later measurements no longer depend on the host's speed",
    OVER_LIMIT: "over the memory limit",
    INCONCLUSIVE: "inconclusive: {detail}",
    WRONG_LOSS: "the loss{step_name} is {off} off the reference ({allowed} allowed)",
    WRONG_GRADIENTS: "the gradients{place}{step_name} are {off} off the reference ({allowed} allowed)",
    WRONG_UPDATES: "the updates of the weights{place}{step_name} are {off} off the reference ({allowed} allowed)",
    CHECK_FAILED: "{detail}",
    NOT_RUN: "{detail}",
    UNCHECKED: "; losses and gradients not checked",
    RANDOM: "; losses and gradients not judged: the step is not the same twice",
    OTHER_DRAWS: "; judged by what other random numbers do, as it draws other ones",
}


def describe(decision: Decision) -> str:
    """The decision as a sentence.

    >>> describe(Decision(key=WRONG_LOSS, values={"error": 0.25, "allowed": 0.02}))
    'the loss is 25 % off the reference (2 % allowed)'
    >>> describe(Decision(key=WRONG_GRADIENTS, values={"error": 0.25, "allowed": 0.02, "step": 2.0}, detail="of head.weight"))
    'the gradients of head.weight of step 2 are 25 % off the reference (2 % allowed)'
    """
    values = {name: math.nan if value is None else value for name, value in decision.values.items()}
    error = values.get("error", 0.0)
    off = f"{error:.2g} times" if not math.isfinite(error) or error > 10 else f"{100 * error:.2g} %"
    allowed = f"{100 * values.get('allowed', 0.0):.2g} %"
    sentence = _SENTENCES.get(decision.key, decision.key) + _SENTENCES.get(decision.check, "")
    place = f" {decision.detail}" if decision.detail else ""
    step_name = f" of step {values['step']:.0f}" if values.get("step", 1.0) > 1 else ""
    words = {"off": off, "allowed": allowed, "place": place, "step_name": step_name}
    return sentence.format(detail=decision.detail, **(values | words))


def describe_attempt(attempt: Attempt) -> str:
    """An attempt in one line, for whoever watches.

    >>> times = {"before_ns": 2e7, "after_ns": 1e7}
    >>> describe_attempt(Attempt(lever="graph", value="on", before="off", status="ok", kept=True, why="faster", **times))
    'graph = on: 20.0 ms → 10.0 ms, kept: faster'
    """
    if attempt.status != OK:
        return f"{attempt.name}: {attempt.status}: {attempt.why}"
    times = f"{units.duration(attempt.before_ns or 0)} → {units.duration(attempt.judged_ns or 0)}"
    return f"{attempt.name}: {times}, {'kept' if attempt.kept else 'not kept'}: {attempt.why}"


_WRONG = {LOSS: WRONG_LOSS, GRADIENT: WRONG_GRADIENTS, UPDATE: WRONG_UPDATES}
_DIRECTIONS = {SCALE: "(their length)", DECAY: "(weight decay)"}


def disagreement(agreement: Agreement | None) -> Decision | None:
    """What differs from the reference by more than rounding does; None if nothing does, or nothing was compared.

    Of several, the one that is furthest beyond it: in the first step, if there is one.
    """
    wrong = [one for one in agreement.differences if not one.error <= allowed(one)] if agreement is not None else []
    if not wrong:
        return None
    worst = max((one for one in wrong if one.step == min(one.step for one in wrong)), key=_excess)
    place = f"of {worst.where}" if worst.where else _DIRECTIONS.get(worst.measure, "")
    step = float(worst.step)
    return Decision(
        key=_WRONG[worst.kind], values={"error": worst.error, "allowed": allowed(worst), "step": step}, detail=place
    )


def allowed(difference: Difference) -> float:
    """How far it may be off.

    >>> allowed(Difference(kind="gradient", step=1, error=0.1, rounding=0.01))
    0.02
    """
    factor = ALLOWED_LOSS if difference.kind == LOSS else ALLOWED[difference.measure]
    return factor * (ALLOWED_LATER if difference.step > 1 else 1.0) * difference.rounding


def _excess(difference: Difference) -> float:
    ratio = difference.error / allowed(difference)
    return math.inf if math.isnan(ratio) else ratio


def decide(
    comparison: Comparison,
    before_bytes: int | None,
    after_bytes: int | None,
    limit_bytes: int | None,
    *,
    steadier: bool = False,
) -> Decision:
    """Whether a lever is kept, and why: faster; or as fast and smaller; or needed to stay within the memory.

    `steadier`: it takes the host's speed out of the step, so it may stay if it is as fast, or not slower by what was seen.
    """
    saved_share = 0.0
    if before_bytes is not None and after_bytes is not None:
        saved_share = 1 - after_bytes / before_bytes if before_bytes else 0.0
        if limit_bytes is not None and (by_limit := _by_limit(before_bytes, after_bytes, limit_bytes)) is not None:
            return by_limit
    by_speed = Decision(key=comparison.verdict, detail=comparison.reason)
    if by_speed.key in (FASTER, SLOWER):
        return by_speed
    if saved_share > SMALLER_SHARE:
        return Decision(key=SMALLER, values={"saved_share": saved_share})
    not_slower = by_speed.key == NO_DIFFERENCE or (comparison.ratio or math.inf) <= 1
    return Decision(key=STEADIER) if steadier and not_slower else by_speed


def _by_limit(before: int, after: int, limit: int) -> Decision | None:
    """What the memory limit decides, whatever the speed; None: nothing."""
    if after > limit and after >= before:
        return Decision(key=OVER_LIMIT)
    if before > limit and (after <= limit or 1 - after / before > SMALLER_SHARE):
        return Decision(key=UNDER_LIMIT)
    return None


def checked(decision: Decision, agreed: AgreementResult, varies: bool) -> Decision:
    """The decision once results are looked at: what is wrong is not kept, however fast. `varies`: so does the reference."""
    if decision.key not in KEPT:
        return decision
    if agreed.failed:
        return Decision(key=CHECK_FAILED, detail=agreed.failed)
    if agreed.agreement is None:
        return msgspec.structs.replace(decision, check=UNCHECKED)
    if varies:
        return msgspec.structs.replace(decision, check=RANDOM)
    if (wrong := disagreement(agreed.agreement)) is not None:
        return wrong
    return decision if agreed.agreement.same_draws else msgspec.structs.replace(decision, check=OTHER_DRAWS)


def fp8_notes(point: Point) -> tuple[str, ...]:
    """Of a user's step in fp8: how many layers are, and which not."""
    return (point.ran.linear,) if point.ran is not None and point.ran.linear else ()


def throttle_notes(throttle: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Whether the GPU's clock was held down while levers were measured; of every measurement, why.

    >>> throttle_notes([(), ("software power cap",)])
    ('the GPU was throttled (software power cap) in 1 of 2 measurements: less work saves less time then',)
    """
    why = ", ".join(dict.fromkeys(reason for one in throttle for reason in one))
    n = sum(map(bool, throttle))
    text = f"the GPU was throttled ({why}) in {n} of {len(throttle)} measurements: less work saves less time then"
    return (text,) if why else ()


def peak(memory: Sequence[PhaseMemory]) -> int | None:
    """The step's peak; None where it was not measured."""
    return max((phase.peak_bytes for phase in memory), default=None)


def step_ns(point: Point) -> float:
    times = point.times(STEP)
    assert times is not None
    return level(times.by_process("wall"))
