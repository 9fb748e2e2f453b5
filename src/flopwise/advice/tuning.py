"""What `tune` writes down as it goes: how it began, every lever tried, how it ended. And when a lever is kept."""

import math
from typing import Annotated

import msgspec

from flopwise import units
from flopwise.advice.finding import Finding
from flopwise.advice.moves import named
from flopwise.analysis.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER, Comparison
from flopwise.analysis.waterfall import Waterfall
from flopwise.records import OK, Agreement
from flopwise.spec.recipe import LEVERS
from flopwise.spec.workload import Workload

# A file from outside may hold anything: no step takes a year, none holds an exabyte.
Ns = Annotated[float, msgspec.Meta(ge=0, le=3e16)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3e7)]
SHORTEST = 1e-9  # ratio of two steps that can be: less is of a file from outside
SMALLER = 0.05  # of the peak: a lever that is not faster is kept if it saves more than this
# How far losses and gradients may be from the reference's: rounding, with room for a few steps of training.
LOSS_BOUNDS = {"fp32": 1e-3, "tf32": 5e-3}
GRADIENT_BOUNDS = {"fp32": 5e-3, "tf32": 2e-2}
HALF_LOSS, HALF_GRADIENT = 2e-2, 0.15  # bf16 and fp16


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="begun"):
    """The step before anything was changed."""

    workload: Workload
    step_ns: Ns
    peak_bytes: Bytes | None = None
    gpu: str = ""
    waterfall: Waterfall | None = None
    findings: tuple[Finding, ...] = ()
    agreement: Agreement | None = None  # of the step as it was, with the reference
    notes: tuple[str, ...] = ()


class Attempt(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="attempt"):
    """One lever, tried against the best so far."""

    lever: str
    value: str
    before: str  # the lever's value until then
    status: str  # 'ok', or why there is no measurement: 'oom', 'unsupported', …
    predicted_ns: float | None = None  # saving of a step, before it was run
    arithmetic: str = ""
    before_ns: Ns | None = None  # medians of the two, taken in turns
    after_ns: Ns | None = None
    comparison: Comparison | None = None
    before_bytes: Bytes | None = None  # peaks
    after_bytes: Bytes | None = None
    agreement: Agreement | None = None
    kept: bool = False
    why: str = ""
    rules: tuple[str, ...] = ()  # the findings that ask for it
    also: dict[str, str] = {}  # levers that were changed with it

    def __post_init__(self) -> None:
        """A file from outside may name anything."""
        if unknown := [lever for lever in self.levers if lever not in LEVERS]:
            raise ValueError(f"there is no lever {unknown[0]!r}")
        blocks = self.levers.get("checkpoint", "0")
        if not (blocks.isascii() and blocks.isdecimal() and len(blocks) < 6):
            raise ValueError("checkpoint is a number of blocks")

    @property
    def levers(self) -> dict[str, str]:
        return {self.lever: self.value, **self.also}

    @property
    def name(self) -> str:
        return named(self.levers)

    @property
    def saved_ns(self) -> float | None:
        """Measured, by the ratio that was judged, which is of the samples in pairs; below zero: it takes longer."""
        if self.before_ns is None or self.after_ns is None:
            return None
        ratio = self.comparison.ratio if self.comparison is not None else None
        return self.before_ns - self.after_ns if ratio is None else self.before_ns * (1 - ratio)

    @property
    def close(self) -> bool | None:
        """Whether the prediction was within 20 % or 1 ms of the measurement; None: there are not both."""
        if self.predicted_ns is None or self.saved_ns is None:
            return None
        return abs(self.predicted_ns - self.saved_ns) <= max(1e6, 0.2 * abs(self.saved_ns))


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="ended"):
    """The step after all that was kept."""

    workload: Workload
    step_ns: Ns
    peak_bytes: Bytes | None = None
    waterfall: Waterfall | None = None
    stopped: str  # 'nothing left to try', 'the budget', 'interrupted'
    seconds: Seconds = 0.0
    notes: tuple[str, ...] = ()


Row = Begun | Attempt | Ended


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tuning, read back; without an end, it was cut off."""

    run: str
    begun: Begun
    attempts: tuple[Attempt, ...]
    ended: Ended | None

    @property
    def in_turns(self) -> float | None:
        """How many times as fast by the levers kept, each measured beside the one before; None: not all were measured so."""
        kept = [attempt for attempt in self.attempts if attempt.kept]
        ratios = [one.comparison.ratio if one.comparison is not None else None for one in kept]
        known = [ratio for ratio in ratios if ratio is not None and ratio > SHORTEST]
        return 1 / math.prod(known) if len(known) == len(kept) else None

    @property
    def first_ns(self) -> float:
        """The step before anything was changed: as it was in turns with the first lever kept, else measured alone."""
        kept = [one.kept for one in self.attempts]
        among = self.attempts[: kept.index(True) + 1 if any(kept) else None]
        known = [one.before_ns for one in among if one.before_ns]
        return known[-1] if known else self.begun.step_ns

    @property
    def last_ns(self) -> float:
        """The step with all that was kept."""
        kept = [one for one in self.attempts if one.kept]
        if not kept:
            return self.first_ns
        return self.ended.step_ns if self.ended is not None else kept[-1].after_ns or self.first_ns

    @property
    def times_faster(self) -> float:
        """The first step's time over the last's."""
        return self.first_ns / self.last_ns if self.last_ns >= 1 and self.first_ns else 1.0

    @property
    def best(self) -> Workload:
        """The recipe that was best when it ended."""
        if self.ended is not None:
            return self.ended.workload
        return _applied(self.begun.workload, self.attempts)


def _applied(start: Workload, attempts: tuple[Attempt, ...]) -> Workload:
    kept = {lever: value for a in attempts if a.kept for lever, value in a.levers.items()}
    levers = {lever: int(value) if lever == "checkpoint" else value for lever, value in kept.items()}
    return msgspec.structs.replace(start, recipe=msgspec.structs.replace(start.recipe, **levers))


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
