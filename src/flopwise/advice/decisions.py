"""When a lever is kept: faster, smaller or needed for the memory limit, and its results right."""

import math

import msgspec

from flopwise import units
from flopwise.advice.constants import GRADIENT_BOUNDS, HALF_GRADIENT_BOUND, HALF_LOSS_BOUND, LOSS_BOUNDS, SMALLER_SHARE
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.records.events import AgreementResult
from flopwise.records.run import OK, Agreement
from flopwise.records.tuning import Attempt, Decision

# The keys of decisions: a comparison's verdict (FASTER, SLOWER, NO_DIFFERENCE, INCONCLUSIVE), or one of these.
SMALLER, UNDER_LIMIT, STEADIER, OVER_LIMIT = "smaller", "under limit", "steadier", "over limit"
WRONG_LOSS, WRONG_GRADIENTS, CHECK_FAILED, NOT_RUN = "wrong loss", "wrong gradients", "check failed", "not run"
KEPT = (FASTER, SMALLER, UNDER_LIMIT, STEADIER)
UNCHECKED, RANDOM = "unchecked", "random"  # a kept lever's `check`

_SENTENCES = {
    SMALLER: "{saved_share:.0%} less memory, and not shown to be slower",
    UNDER_LIMIT: "smaller, as the memory limit requires",
    STEADIER: "not shown to be slower, and later measurements no longer depend on the host's speed",
    OVER_LIMIT: "over the memory limit",
    INCONCLUSIVE: "inconclusive: {detail}",
    WRONG_LOSS: "the loss is {off} off the reference ({allowed} allowed)",
    WRONG_GRADIENTS: "the gradients are {off} off the reference ({allowed} allowed)",
    CHECK_FAILED: "{detail}",
    NOT_RUN: "{detail}",
    UNCHECKED: "; losses and gradients not checked",
    RANDOM: "; losses and gradients not judged: the step draws random numbers",
}


def describe(decision: Decision) -> str:
    """The decision as a sentence.

    >>> describe(Decision(key=WRONG_LOSS, values={"error": 0.25, "allowed": 0.02}))
    'the loss is 25 % off the reference (2 % allowed)'
    """
    values = {name: math.nan if value is None else value for name, value in decision.values.items()}
    error = values.get("error", 0.0)
    off = f"{error:.2g} times" if not math.isfinite(error) or error > 10 else f"{100 * error:.2g} %"
    allowed = f"{100 * values.get('allowed', 0.0):.2g} %"
    sentence = _SENTENCES.get(decision.key, decision.key) + _SENTENCES.get(decision.check, "")
    return sentence.format(detail=decision.detail, **(values | {"off": off, "allowed": allowed}))


def describe_attempt(attempt: Attempt) -> str:
    """An attempt in one line, for whoever watches.

    >>> times = {"before_ns": 2e7, "after_ns": 1e7}
    >>> describe_attempt(Attempt(lever="graph", value="on", before="off", status="ok", kept=True, why="faster", **times))
    'graph = on: 20.0 ms → 10.0 ms, kept: faster'
    """
    if attempt.status != OK:
        return f"{attempt.name}: {attempt.status}: {attempt.why}"
    times = f"{units.duration(attempt.before_ns or 0)} → {units.duration(attempt.after_ns or 0)}"
    return f"{attempt.name}: {times}, {'kept' if attempt.kept else 'not kept'}: {attempt.why}"


def disagreement(agreement: Agreement | None, precision: str) -> Decision | None:
    """How losses or gradients differ from the reference's by more than rounding; None if they do not, or were not compared."""
    if agreement is None:
        return None
    bounds = {
        WRONG_LOSS: (agreement.loss_error, LOSS_BOUNDS.get(precision, HALF_LOSS_BOUND)),
        WRONG_GRADIENTS: (agreement.gradient_error, GRADIENT_BOUNDS.get(precision, HALF_GRADIENT_BOUND)),
    }
    for key, (error, allowed) in bounds.items():
        if error is not None and not error <= allowed:  # a NaN is not
            return Decision(key=key, values={"error": error, "allowed": allowed})
    return None


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


def checked(decision: Decision, agreed: AgreementResult, precision: str, draws_random: bool) -> Decision:
    """The decision once results are looked at: what is wrong is not kept, however fast."""
    if decision.key not in KEPT:
        return decision
    if agreed.failed:
        return Decision(key=CHECK_FAILED, detail=agreed.failed)
    if agreed.agreement is None:
        return msgspec.structs.replace(decision, check=UNCHECKED)
    wrong = disagreement(agreed.agreement, precision)
    if wrong is None:
        return decision
    return msgspec.structs.replace(decision, check=RANDOM) if draws_random else wrong
