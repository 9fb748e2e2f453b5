"""When a lever is kept: faster, smaller or needed, and right."""

import math

from flopwise import units
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.records.run import OK, Agreement
from flopwise.records.tuning import Attempt

SMALLER = 0.05  # of the peak: a lever that is not faster is kept if it saves more than this
# How far losses and gradients may be from the reference's: rounding, with room for a few steps of training.
LOSS_BOUNDS = {"fp32": 1e-3, "tf32": 5e-3}
GRADIENT_BOUNDS = {"fp32": 5e-3, "tf32": 2e-2}
HALF_LOSS, HALF_GRADIENT = 2e-2, 0.15  # bf16 and fp16


def told(attempt: Attempt) -> str:
    """An attempt in one line, for who watches.

    >>> told(Attempt(lever="graph", value="on", before="off", status="ok", before_ns=2e7, after_ns=1e7, kept=True, why="faster"))
    'graph = on: 20.0 ms → 10.0 ms, kept: faster'
    """
    if attempt.status != OK:
        return f"{attempt.name}: {attempt.status}: {attempt.why}"
    times = f"{units.duration(attempt.before_ns or 0)} → {units.duration(attempt.after_ns or 0)}"
    return f"{attempt.name}: {times}, {'kept' if attempt.kept else 'not kept'}: {attempt.why}"


def wrong(agreement: Agreement | None, precision: str) -> str:
    """Why losses or gradients are not those of the reference; '' if they are, or if there are none to look at.

    >>> wrong(Agreement(losses=(2.5,), reference_losses=(2.0,), gradient_error=0.01), "bf16")
    'the loss is 25 % off the reference (2 % allowed)'
    """
    if agreement is None:
        return ""
    half = precision not in LOSS_BOUNDS
    most_loss = HALF_LOSS if half else LOSS_BOUNDS[precision]
    most_gradient = HALF_GRADIENT if half else GRADIENT_BOUNDS[precision]
    for what, error, most in (
        ("the loss is", agreement.loss_error, most_loss),
        ("the gradients are", agreement.gradient_error, most_gradient),
    ):
        if error is not None and not error <= most:
            off = f"{error:.2g} times" if not math.isfinite(error) or error > 10 else f"{100 * error:.2g} %"
            return f"{what} {off} off the reference ({100 * most:.2g} % allowed)"
    return ""


def decide(
    comparison: Comparison,
    before_bytes: int | None,
    after_bytes: int | None,
    limit_bytes: int | None,
    *,
    steadier: bool = False,
) -> tuple[bool, str]:
    """Whether a lever is kept, and why: faster; or as fast and smaller; or needed to stay within the memory.

    `steadier`: it takes the host's pace out of the step, and so may stay if it is as fast, or not slower by what was seen.
    """
    if limit_bytes is not None and after_bytes is not None and before_bytes is not None:
        if after_bytes > limit_bytes and after_bytes >= before_bytes:
            return False, "over the memory limit"
        enough = after_bytes <= limit_bytes or after_bytes < (1 - SMALLER) * before_bytes
        if before_bytes > limit_bytes and enough:
            return True, "smaller, which the memory limit asks for"
    if comparison.verdict == FASTER:
        return True, "faster"
    if comparison.verdict == SLOWER:
        return False, "slower"
    if before_bytes and after_bytes is not None and after_bytes < (1 - SMALLER) * before_bytes:
        speed = "no slower" if comparison.verdict == NO_DIFFERENCE else "not shown to be slower"
        return True, f"{1 - after_bytes / before_bytes:.0%} less memory, and {speed}"
    if steadier and (comparison.verdict == NO_DIFFERENCE or (comparison.ratio or math.inf) <= 1):
        return True, "not shown to be slower, and what comes next is measured without the host's pace"
    reason = f": {comparison.reason}" if comparison.verdict == INCONCLUSIVE and comparison.reason else ""
    return False, f"{comparison.verdict}{reason}"
