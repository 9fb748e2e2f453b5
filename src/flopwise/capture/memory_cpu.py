"""A recorded step on the CPU, written as PyTorch writes a GPU's memory snapshot: one format, one reader, one viewer.

The CPU has no caching allocator: every tensor is an allocation of its own, of exactly its bytes. Addresses are numbers, each
given once, so that the frees of two tensors are never confused.
"""

from collections.abc import Sequence
from typing import Any

from flopwise.capture.watch.tape import ALLOC, HOST, OP, Event, Section, Tape
from flopwise.records.memory import OP as OP_LABEL
from flopwise.records.memory import PHASE
from flopwise.records.run import PhaseMemory

_PAGE = 4096  # addresses are multiples of it
Frames = dict[int, list[dict[str, Any]]]


def address(number: int) -> int:
    """The address that stands for a storage."""
    return (number + 1) * _PAGE


class CpuHistory:
    """What moved memory in some sections of a tape, which are its last ones, and what was there before them."""

    def __init__(self, tape: Tape, owners: Sequence[str], times_us: Sequence[int], recorded: Sequence[Section]) -> None:
        """`times_us`: of every event of the tape."""
        self.tape, self.owners = tape, owners
        self.events: list[tuple[Event, str]] = []  # with its label: the op that ran last, else the phase
        self.times_us: list[int] = []
        self.before: set[int] = set()
        self.marks: list[tuple[int, str]] = []  # (position among `events`, the section that begins there)
        at, clock = 0, 0
        sections = tape.sections()
        earlier = len(sections) - len(recorded)
        for place, section in enumerate(sections):
            if place >= earlier:
                self.marks.append((len(self.events), section.name))
            label = f"{PHASE}{section.name}"
            for event in section.events:
                kind, number = event
                if kind == OP:
                    label = f"{OP_LABEL}{number}"
                elif self._counts(number) and place < earlier:
                    (self.before.add if kind == ALLOC else self.before.discard)(number)
                elif self._counts(number):
                    clock = max(clock + 1, times_us[at])  # strictly rising: an event's time identifies it
                    self.events.append((event, label))
                    self.times_us.append(clock)
                at += 1
        self.after = set(self.before)
        for (kind, number), _ in self.events:
            (self.after.add if kind == ALLOC else self.after.discard)(number)

    def _counts(self, number: int) -> bool:
        return self.owners[number] != HOST and self.tape.storages[number].nbytes > 0

    def snapshot(self, frames: Frames, failed: dict[str, int] | None = None) -> dict[str, Any]:
        """The snapshot; `failed`: what was asked for (`size`) and free (`device_free`) when memory ran out."""
        trace = [self._entry(i, frames) for i in range(len(self.events))]
        if failed is not None:
            last_us = self.times_us[-1] + 1 if self.times_us else 0
            trace.append({"action": "oom", "addr": 0, "stream": 0, "time_us": last_us, "frames": [], **failed})
        return {
            "segments": [self._segment(number, frames) for number in sorted(self.after)],
            "device_traces": [trace],
            "allocator_settings": {},
            "external_annotations": self._annotations(),
        }

    def _entry(self, i: int, frames: Frames) -> dict[str, Any]:
        (kind, number), label = self.events[i]
        storage = self.tape.storages[number]
        entry = {"addr": address(number), "size": storage.nbytes, "stream": 0, "time_us": self.times_us[i]}
        if kind == ALLOC:
            label = f"{OP_LABEL}{storage.op}"
            return {"action": "alloc", **entry, "frames": frames.get(number, []), "user_metadata": label}
        return {"action": "free_completed", **entry, "frames": [], "user_metadata": label}

    def _segment(self, number: int, frames: Frames) -> dict[str, Any]:
        size = self.tape.storages[number].nbytes
        both = {"address": address(number), "requested_size": size}
        block = both | {"size": size, "state": "active_allocated", "frames": frames.get(number, [])}
        sizes = dict.fromkeys(("total_size", "allocated_size", "active_size"), size)
        kind = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
        return {"device": 0, "stream": 0, **both, **sizes, **kind, "frames": [], "blocks": [block]}

    def _annotations(self) -> list[dict[str, Any]]:
        """Each step as a range; a step begins with its first section."""
        if not self.marks or not self.events:
            return []
        times, first = [*self.times_us, self.times_us[-1] + 1], self.marks[0][1]
        starts = [times[at] for at, name in self.marks if name == first]
        return [
            {"device": 0, "name": f"flopwise.step:{step}", "stage": stage, "time_us": time_us}
            for step, ends in enumerate(zip(starts, [*starts[1:], times[-1]], strict=True))
            for stage, time_us in zip(("START", "END"), ends, strict=True)
        ]

    def phases(self) -> tuple[PhaseMemory, ...]:
        """Start, peak and end of each phase of the last step that has all of them; reserved is what was ever allocated."""
        names = [name for _, name in self.marks]
        per_step = names.index(names[0], 1) if names.count(names[0]) > 1 else len(names)
        whole = len(names) // per_step * per_step if per_step else 0
        spans = [*(at for at, _ in self.marks), len(self.events)]
        live = most = sum(self.tape.storages[n].nbytes for n in self.before)
        phases = []
        for i, name in enumerate(names):
            start = peak = live
            for (kind, number), _ in self.events[spans[i] : spans[i + 1]]:
                live += self.tape.storages[number].nbytes * (1 if kind == ALLOC else -1)
                peak = max(peak, live)
            most = max(most, peak)
            if whole - per_step <= i < whole:
                memory = PhaseMemory(
                    phase=name, start_bytes=start, peak_bytes=peak, end_bytes=live, reserved_bytes=most
                )
                phases.append(memory)
        return tuple(phases)
