"""The report of a snapshot: the record that is shown, written as JSON and drawn."""

from collections.abc import Mapping, Sequence

import msgspec

from flopwise.predict.fit import LeverEffect
from flopwise.records.prediction import MemoryPrediction
from flopwise.records.printed import Printed
from flopwise.snapshot.snapshot import Frame

MEASURED, PREDICTED = "measured", "predicted"


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What is allocated, reserved, and neither, after an event."""

    event: int  # BEFORE: before the first
    time_us: int | None  # since the first event; None: the snapshot has no clock
    phase: str
    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int  # of the allocated: what the program asked for; the rest is rounding
    owners: dict[str, int]

    @property
    def unused_bytes(self) -> int:
        """Reserved and not allocated: cached or fragmented."""
        return self.reserved_bytes - self.allocated_bytes


class LargeAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """One of the largest allocations at the peak, or several alike."""

    bytes: int  # of one
    count: int  # allocations of this size, owner and stack; of a workload of ours: of this kind in all layers
    requested_bytes: int
    owner: str
    phase: str
    stack: str  # the user's own frames
    frames: tuple[Frame, ...] = ()  # all of them, on request
    module: str = ""  # this and what follows are known only of a workload that flopwise ran
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    saved_by: str = ""  # the ops that had it saved for backward


class OpBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at the peak that one op made, of one type."""

    op: str
    dtype: str  # '' where it is not a tensor: a kernel's own memory
    count: int
    bytes: int  # of all


def by_op(kinds: Mapping[tuple[str, str], Sequence[int]]) -> tuple[OpBytes, ...]:
    """The sizes of each op's and type's allocations as rows, the most bytes first."""
    rows = (OpBytes(op=op, dtype=dtype, count=len(all_), bytes=sum(all_)) for (op, dtype), all_ in kinds.items())
    return tuple(sorted(rows, key=lambda one: (-one.bytes, one.op, one.dtype)))


class SavedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that forward keeps for backward."""

    bytes: int
    owner: str
    module: str
    op: str  # that made it
    saved_by: str  # '' where that is not known
    shape: tuple[int, ...]
    dtype: str


class SavedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What one block keeps for backward; blocks that keep the same are one row."""

    block: str  # 'blocks.0 … blocks.31'
    blocks: int
    bytes: int  # of one
    tensors: int
    largest: tuple[SavedTensor, ...]


class NamedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A well-known tensor with its size: the residual stream, the attention matrix."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # of one
    kept: int  # how many of them are kept for backward
    note: str = ""


class GrowthSource(msgspec.Struct, frozen=True, kw_only=True):
    """A stack with allocations that every step makes and none frees: a leak; where memory grows without one, what some leave."""

    bytes_per_step: int
    allocations_per_step: float
    steps: int  # that left something, of `of_steps` that had the time to free it
    of_steps: int
    owner: str
    stack: str
    frames: tuple[Frame, ...] = ()


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How much more is allocated when a step begins than when the one before it began."""

    steps: int
    found_by: str  # how the steps were separated; '' where there are none
    start_bytes: tuple[int, ...]
    bytes_per_step: int | None
    leaks_sought: bool  # whether there were steps enough
    leaks: tuple[GrowthSource, ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A request that failed for lack of memory."""

    time_us: int | None
    asked_bytes: int
    device_free_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    owners: dict[str, int]
    stack: str
    frames: tuple[Frame, ...] = ()


class TimelineLine(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline thinned to its extremes, one entry per moment."""

    event: tuple[int, ...]
    time_us: tuple[int, ...] | None
    phase: tuple[str, ...]
    reserved_bytes: tuple[int, ...]
    owners: dict[str, tuple[int, ...]]


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one device."""

    device: int
    events: int
    allocations: int
    before_bytes: int  # allocated before the recording
    known_share: float  # of the peak's bytes: the owner is known, or follows from a stack and a lifetime
    peak: Moment
    peak_reserved_bytes: int
    end: Moment
    phases: dict[str, int]  # the most allocated in each
    largest: tuple[LargeAllocation, ...]
    growth: Growth
    ooms: tuple[Failure, ...]
    timeline: TimelineLine
    notes: tuple[str, ...] = ()
    note_keys: tuple[str, ...] = ()  # of the notes, in their order
    temporary: tuple[OpBytes, ...] = ()  # the peak's temporary bytes by op, the most first; known of our own runs only
    saved: tuple[SavedBlock, ...] = ()
    named: tuple[NamedTensor, ...] = ()
    guessed_share: float = 0.0  # of the peak's bytes: the owner follows from the size alone
    exact: bool = False  # owners were recorded when the bytes were allocated, not derived from stacks


class MemoryReport(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's report, device by device, the highest peak first; of a workload with its predictions."""

    path: str
    devices: tuple[DeviceMemory, ...]  # none where memory ran out before anything was recorded
    label: str = ""  # of the workload; '' for a snapshot of others
    where: str = ""  # on which device or GPU
    obtained: str = MEASURED
    status: str = "ok"
    reason: str = ""
    hint: str = ""
    predictions: tuple[MemoryPrediction, ...] = ()
    levers: tuple[LeverEffect, ...] = ()
    notes: tuple[str, ...] = ()

    def headline(self) -> str:
        return self.label or self.path
