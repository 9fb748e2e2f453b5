"""A device's events -> its allocations, from when to when."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from flopwise.records.note import Note, counted
from flopwise.snapshot.rows import checked_sizes
from flopwise.snapshot.snapshot import ALLOCATIONS, BEFORE, NO_STACK, Ints
from flopwise.work.allocator import rounded

_ADDRESSES = 2**63 - 1  # those of a device are smaller; a file may hold anything
ALLOC, REQUESTED, COMPLETED, FREE = "alloc", "free_requested", "free_completed", "free"
FREES = (REQUESTED, COMPLETED, FREE)


class Block(NamedTuple):
    """A piece of a segment that is in use when the snapshot is taken."""

    bytes: int
    requested_bytes: int
    stream: int
    stack: int


@dataclass
class _Rows:
    """Allocations in the order of the trace, one list per column."""

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    requested_bytes: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    address: list[int] = field(default_factory=list)
    hint: list[int] = field(default_factory=list)

    def add(
        self, start: int, end: int, requested: int, stream: int, stack: int, hint: int, address: int, size: int = -1
    ) -> int:
        self.start.append(start)
        self.end.append(end)
        self.bytes.append(size if size >= 0 else rounded(requested))
        self.requested_bytes.append(requested)
        self.stream.append(stream)
        self.stack.append(stack)
        self.address.append(address & _ADDRESSES)
        self.hint.append(hint)
        return len(self.start) - 1

    def table(self) -> pl.DataFrame:
        checked_sizes(self.bytes, "'size'")
        return pl.DataFrame({name: getattr(self, name) for name in ALLOCATIONS}, schema=ALLOCATIONS)


class Events(NamedTuple):
    """The trace of one device, one entry per event in every field."""

    actions: Sequence[str]
    addresses: Sequence[int]
    sizes: Sequence[int]
    streams: Sequence[int]
    stacks: Sequence[int]
    hints: Sequence[int]


def allocations(
    events: Events, blocks: dict[int, Block], whole: bool, repeated: bool = False
) -> tuple[pl.DataFrame, tuple[Note, ...]]:
    """Every allocation once: those of the trace, those freed in it that were there before, those there all along.

    An allocation ends when its free is requested: torch's `memory_allocated` counts so; the wait for another stream's work
    after it (until free_completed) is 'active', not allocated. `whole`: the blocks are all that is in use at the end.
    `repeated`: frees carry the stacks of their allocations.
    """
    rows = _Rows()
    last = len(events.actions)
    asks = REQUESTED in events.actions or FREE in events.actions
    living: dict[int, int] = {}  # address -> row
    waiting: set[int] = set()  # freed, not yet reusable
    seen: set[int] = set()
    replaced = 0
    for i, (action, address, size, stream, stack, hint) in enumerate(zip(*events, strict=True)):
        if action == ALLOC:
            if address in living:
                rows.end[living[address]] = i
                replaced += 1
            living[address] = rows.add(i, last, size, stream, stack, hint, address)
            waiting.discard(address)
            seen.add(address)
        elif action in (REQUESTED, FREE) or (action == COMPLETED and (address in living or not asks)):
            row = living.pop(address, None)
            if row is not None:
                rows.end[row] = i
            elif address not in waiting:
                rows.add(BEFORE, i, size, stream, stack if repeated else NO_STACK, 0, address)
            waiting.add(address)
            seen.add(address)
        elif action == COMPLETED:
            waiting.discard(address)
    later = _still_there(rows, living, blocks, seen, last)
    freed = len(living.keys() - blocks.keys()) if whole else 0
    return rows.table(), counted(
        replaced=(replaced, "allocation", "replaced at the same address, without a recorded free"),
        later=(later, "block", "allocated after the recording ended: not counted"),
        freed_later=(freed, "allocation", "without a block at the end: freed after the recording"),
    )


def frees_repeat_stacks(events: Events) -> bool:
    """Whether frees carry the stacks of their allocations, as they do unless recorded with context='all'.

    Such a stack is of the allocation, not of the free. Recorded with context='all', some free has another stack.
    """
    made: dict[int, int] = {}
    for action, address, stack in zip(events.actions, events.addresses, events.stacks, strict=True):
        if action == ALLOC:
            made[address] = stack
        elif action in FREES and made.get(address, stack) != stack:
            return False
    return True


def _still_there(rows: _Rows, living: dict[int, int], blocks: dict[int, Block], seen: set[int], last: int) -> int:
    """Blocks in use at the end give what lives its true size; the unseen among them were there before the recording."""
    later = 0
    for address, block in blocks.items():
        row = living.get(address)
        if row is not None:
            rows.bytes[row], rows.requested_bytes[row] = block.bytes, block.requested_bytes
        elif address in seen:
            later += 1
        else:
            rows.add(BEFORE, last, block.requested_bytes, block.stream, block.stack, 0, address, block.bytes)
    return later


def reserved(actions: Sequence[str], sizes: Ints, at_end_bytes: int) -> Ints:
    """Bytes in segments before the first event and after each, counted back from the end, which the snapshot gives.

    >>> reserved(["segment_alloc", "alloc", "segment_free"], np.array([20, 5, 8]), 32)
    array([20, 40, 40, 32])
    """
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    deltas = np.array([signs.get(action, 0) for action in actions], dtype=np.int64) * sizes
    after = np.concatenate(([0], np.cumsum(deltas)))
    after += at_end_bytes - after[-1]
    return np.asarray(after - min(0, after.min()), dtype=np.int64)
