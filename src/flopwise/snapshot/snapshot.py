"""One record of what a PyTorch memory snapshot says, whatever version of torch wrote it.

The order of events is the order of the trace; `time_us` only labels it (torch 2.1 wrote none). An allocation lives from event
`start` up to, not including, event `end`. BEFORE means that it was there when the recording began; the number of events, that
it is still there. Stacks are stored once: `stacks[i]` holds indices into `frames`, innermost first; stack 0 is empty.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.records.note import Note

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

BEFORE = -1  # the start of what was allocated before the recording
NO_STACK = 0

ALLOCATIONS = {
    "start": pl.Int64,  # an event's number, or BEFORE
    "end": pl.Int64,  # an event's number; the number of events: still there
    "bytes": pl.Int64,  # what it takes of the allocator's memory
    "requested_bytes": pl.Int64,  # what the program asked for
    "stream": pl.Int64,
    "stack": pl.Int32,
    "address": pl.Int64,
    "hint": pl.Int32,  # index into `hints`: a label from the program or from torch
}


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack."""

    file: str
    line: int
    name: str


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A request that failed."""

    event: int
    time_us: int | None
    asked_bytes: int
    device_free_bytes: int | None  # what CUDA still had; None: the snapshot does not say
    stack: int


@dataclass(frozen=True)
class Annotation:
    """A range that the program named (record_function), in the trace's clock; open ends are None."""

    name: str
    start_us: int | None
    end_us: int | None


@dataclass(frozen=True)
class DeviceHistory:
    """One device: its allocations, and per event the stack and how much was reserved after it."""

    device: int
    events: int
    time_us: Ints | None  # of every event, never falling; None where torch wrote none
    allocations: pl.DataFrame
    reserved_bytes: Ints  # after event i - 1: one more than there are events, the first before any
    event_stacks: Ints
    event_hints: Ints
    ooms: tuple[OutOfMemory, ...]
    annotations: tuple[Annotation, ...]
    segments: int
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """What is in the file."""

    path: str
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]
    hints: tuple[str, ...]  # labels from the program: user metadata, or a profiler's category as 'category:…'
    devices: tuple[DeviceHistory, ...]

    def stack(self, index: int) -> tuple[Frame, ...]:
        """The frames of a stack, innermost first."""
        return tuple(self.frames[i] for i in self.stacks[index])
