"""What `tune` writes down as it goes: how it began, every lever tried, how it ended."""

import math
from typing import Annotated

import msgspec

from flopwise.records.comparison import Comparison
from flopwise.records.finding import Finding
from flopwise.records.printed import Printed
from flopwise.records.run import Agreement, Ran
from flopwise.records.waterfall import Waterfall
from flopwise.spec.recipe import LEVERS, named
from flopwise.spec.workload import Workload

# A file from outside may hold anything: no step takes a year, none holds an exabyte.
Ns = Annotated[float, msgspec.Meta(ge=0, le=3e16)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3e7)]
_LEAST_RATIO = 1e-9  # of two steps: less is in no measurement

NOTHING_LEFT, BUDGET_SPENT = "nothing left to try", "budget spent"  # why a tuning stopped; or INTERRUPTED


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="begun"):
    """The step before anything was changed."""

    workload: Workload
    step_ns: Ns
    peak_bytes: Bytes | None = None
    gpu: str = ""
    waterfall: Waterfall | None = None
    findings: tuple[Finding, ...] = ()
    agreement: Agreement | None = None  # of the step as it was, with the reference
    ran: Ran | None = None  # what the step did; its FLOPs and tokens are those of all that follow
    notes: tuple[str, ...] = ()
    note_keys: tuple[str, ...] = ()  # of each note, what it is about; runs of earlier versions have none


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why a lever is kept or not; `flopwise.advice.decisions` has the keys, and the sentence for each."""

    key: str
    check: str = ""  # of a kept lever whose losses and gradients were not judged: why
    values: dict[str, float | None] = {}  # None: not a number
    detail: str = ""  # a message from elsewhere, such as an error's


class Attempt(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="attempt"):
    """One lever, tried against the best so far."""

    lever: str
    value: str
    before: str  # the lever's value until then
    status: str  # 'ok', or why there is no measurement: 'oom', 'unsupported', …
    predicted_ns: float | None = None  # saving of a step, before it was run
    arithmetic: str = ""
    before_ns: Ns | None = None  # medians of the two, measured against each other
    after_ns: Ns | None = None
    comparison: Comparison | None = None
    before_bytes: Bytes | None = None  # peaks
    after_bytes: Bytes | None = None
    agreement: Agreement | None = None
    kept: bool = False
    why: str = ""  # the decision as a sentence
    decision: Decision | None = None  # None: a run of an earlier version
    rules: tuple[str, ...] = ()  # the findings that ask for it
    also: dict[str, str] = {}  # levers that were changed with it
    worth_ns: dict[
        str, float
    ] = {}  # of each of several that are kept: by how much longer the step is predicted to be without it

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
        """Measured, by the ratio that was judged, which is that of the pairs of samples; below zero: it takes longer."""
        if self.before_ns is None or self.after_ns is None:
            return None
        ratio = self.comparison.ratio if self.comparison is not None else None
        return self.before_ns - self.after_ns if ratio is None else self.before_ns * (1 - ratio)

    @property
    def judged_ns(self) -> float | None:
        """The step with it, by the same ratio: medians of the two may move apart with the machine's speed."""
        return None if self.before_ns is None or self.saved_ns is None else self.before_ns - self.saved_ns

    @property
    def close(self) -> bool | None:
        """Whether the prediction was within 20 % or 1 ms of the measurement; None: there are not both."""
        if self.predicted_ns is None or self.saved_ns is None:
            return None
        return abs(self.predicted_ns - self.saved_ns) <= max(1e6, 0.2 * abs(self.saved_ns))


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="row", tag="ended"):
    """The step with every lever that was kept."""

    workload: Workload
    step_ns: Ns
    before_ns: Ns | None = None  # the first step's, measured against this one; None: it was not
    comparison: Comparison | None = None  # of these two
    peak_bytes: Bytes | None = None
    waterfall: Waterfall | None = None
    stopped: str  # NOTHING_LEFT, BUDGET_SPENT or INTERRUPTED; in runs of earlier versions a sentence on the budget
    seconds: Seconds = 0.0
    notes: tuple[str, ...] = ()


Row = Begun | Attempt | Ended


class Tuning(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A whole tuning, read back; without an end, it was cut off."""

    run: str
    begun: Begun
    attempts: tuple[Attempt, ...]
    ended: Ended | None
    warnings: tuple[str, ...] = ()  # what was left out, as the run is damaged

    def headline(self) -> str:
        return (
            f"{self.run}, {len(self.kept)} of {len(self.attempts)} attempts kept, {self.times_faster:.2f} times as fast"
        )

    @property
    def kept(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.kept]

    @property
    def in_turns(self) -> float | None:
        """How many times as fast by the levers kept, each measured against the one before; None: not all were measured so."""
        ratios = [one.comparison.ratio if one.comparison is not None else None for one in self.kept]
        known = [ratio for ratio in ratios if ratio is not None and ratio > _LEAST_RATIO]
        return 1 / math.prod(known) if len(known) == len(ratios) else None

    @property
    def first_ns(self) -> float:
        """The step before anything was changed: as measured against the last; else against the first lever kept, or alone."""
        if self.ended is not None and self.ended.before_ns is not None:
            return self.ended.before_ns
        until = self.attempts.index(self.kept[0]) + 1 if self.kept else None
        known = [one.before_ns for one in self.attempts[:until] if one.before_ns]
        return known[-1] if known else self.begun.step_ns

    @property
    def last_ns(self) -> float:
        """The step with every lever that was kept."""
        if not self.kept:
            return self.first_ns
        return self.ended.step_ns if self.ended is not None else self.kept[-1].after_ns or self.first_ns

    @property
    def times_faster(self) -> float:
        """The first step's time over the last's."""
        return self.first_ns / self.last_ns if self.last_ns >= 1 and self.first_ns else 1.0

    @property
    def best(self) -> Workload:
        """The recipe that was best when it ended."""
        if self.ended is not None:
            return self.ended.workload
        kept = {lever: value for one in self.kept for lever, value in one.levers.items()}
        levers = {lever: int(value) if lever == "checkpoint" else value for lever, value in kept.items()}
        start = self.begun.workload
        return msgspec.structs.replace(start, recipe=msgspec.structs.replace(start.recipe, **levers))
