"""A snapshot of flopwise's own, read with what the workload's process knew: owners are exact instead of guessed."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from flopwise.predict.shapes.memory import without_layer
from flopwise.records.memory import OP, Knowledge, KnownTensor
from flopwise.snapshot.answers import OpBytes, Saved, by_op
from flopwise.snapshot.owners import OWNERS
from flopwise.snapshot.snapshot import BEFORE, DeviceHistory, Snapshot
from flopwise.snapshot.timeline import allocated_bytes
from flopwise.trace.phases import phase_of_range
from flopwise.work.operation import SAVED, TEMPORARY, UNKNOWN, WORKSPACE


class Told:
    """What is known of each allocation of one device, in the order of its table."""

    def __init__(self, snapshot: Snapshot, device: DeviceHistory, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        index = {(tensor.event, tensor.address): tensor for tensor in knowledge.tensors}
        table = device.allocations
        places = zip(table["start"].to_list(), table["address"].to_list(), strict=True)
        known = zip(map(index.get, places), table["bytes"].to_list(), strict=True)
        # A tensor that does not fit was freed before the recording, and another got its address: cuBLAS's workspace, say.
        self.tensors: list[KnownTensor | None] = [
            tensor if tensor is not None and (knowledge.exact or tensor.bytes <= size) else None
            for tensor, size in known
        ]
        self._hints = [snapshot.hints[number] for number in table["hint"].to_list()]

    def said(self, word: str) -> str | None:
        """The phase of a word of the program: an op's number, or a phase's own name."""
        number = word.removeprefix(OP)
        op = self.knowledge.ops.get(int(number)) if word != number and number.isdecimal() else None
        return self.knowledge.word(op.phase) if op is not None else phase_of_range(word)

    def owners(self, guessed: npt.NDArray[np.int64], device: DeviceHistory) -> npt.NDArray[np.int64]:
        """Owners that are known, and the guess for the rest.

        If every op was watched, what is no tensor is a kernel's own while its op runs; what outlives the op, or was there
        before, is a library's workspace.
        """
        found = guessed.copy()
        start = device.allocations["start"].to_numpy()
        ends = np.minimum(device.allocations["end"].to_numpy(), device.events - 1)
        at_end = device.event_hints[ends] if device.events else ends
        within_op = at_end == device.allocations["hint"].to_numpy()  # the op was still running when it was freed
        numbers = {owner: i for i, owner in enumerate(OWNERS)}
        for row, tensor in enumerate(self.tensors):
            if tensor is not None:
                found[row] = numbers.get(self.knowledge.word(tensor.owner), numbers[UNKNOWN])
            elif self.knowledge.watched and start[row] == BEFORE:
                found[row] = numbers[WORKSPACE]
            elif self.knowledge.watched and self._hints[row].startswith(OP):
                found[row] = numbers[TEMPORARY if within_op[row] else WORKSPACE]
        return found

    def word(self, number: int) -> str:
        return self.knowledge.word(number)

    def kind(self, row: int) -> tuple[object, ...]:
        """What allocations of one kind have in common: op, module without its layer, shape."""
        found = self.details(row)
        return found["op"], without_layer(found["module"]), found["shape"]

    def details(self, row: int) -> dict[str, Any]:
        """Op, module, shape, dtype of an allocation, and who had it saved."""
        tensor = self.tensors[row]
        if tensor is None:  # a kernel's own, or a library's
            number = self._hints[row].removeprefix(OP)
            op = self.knowledge.ops.get(int(number)) if number.isdecimal() else None
            known = {"op": self.word(op.op), "module": self.word(op.module)} if op else {"op": "", "module": ""}
            return known | {"shape": (), "dtype": "", "saved_by": ""}
        words = {name: self.word(getattr(tensor, name)) for name in ("op", "module", "dtype", "saved_by")}
        return words | {"shape": tensor.shape}

    def temporary(
        self, there: npt.NDArray[np.bool_], owner: npt.NDArray[np.int64], device: DeviceHistory
    ) -> tuple[OpBytes, ...]:
        """Of the allocations that are there: the temporary ones by the op that made them, and type."""
        size = device.allocations["bytes"].to_numpy()
        kinds: dict[tuple[str, str], list[int]] = {}
        for row in np.flatnonzero(there & (owner == OWNERS.index(TEMPORARY))).tolist():
            found = self.details(row)
            kinds.setdefault((found["op"], found["dtype"]), []).append(int(size[row]))
        return by_op(kinds)

    def kept(self, there: npt.NDArray[np.bool_], owner: npt.NDArray[np.int64]) -> list[Saved]:
        """Of the allocations that are there when backward begins: what forward keeps for it."""
        rows = [row for row in np.flatnonzero(there).tolist() if OWNERS[owner[row]] in SAVED]
        return [
            Saved(
                bytes=t.bytes,
                owner=OWNERS[owner[row]],
                module=self.word(t.module),
                op=self.word(t.op),
                saved_by=self.word(t.saved_by),
                shape=t.shape,
                dtype=self.word(t.dtype),
            )
            for row in rows
            if (t := self.tensors[row]) is not None
        ]


def exact_history(device: DeviceHistory, told: Told) -> DeviceHistory:
    """The history with the bytes that were asked for: what the CPU allocates; it reserves nothing beyond it."""
    sizes = [t.bytes if t is not None else -1 for t in told.tensors]
    table = device.allocations
    exact = np.where(np.array(sizes) >= 0, sizes, table["requested_bytes"].to_numpy()).astype(np.int64)
    table = table.with_columns(bytes=pl.Series(exact), requested_bytes=pl.Series(exact))
    return replace(device, allocations=table, reserved_bytes=allocated_bytes(table, device.events + 1))
