"""A snapshot of flopwise's own, read with what the workload's process recorded: owners are exact instead of derived."""

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from flopwise.predict.shapes.memory import without_layer
from flopwise.records.memory import OP, Knowledge, KnownOp, KnownTensor
from flopwise.snapshot.answers import OpBytes, SavedTensor, by_op
from flopwise.snapshot.owners import OWNERS
from flopwise.snapshot.snapshot import BEFORE, DeviceHistory, Flags, Ints, Snapshot
from flopwise.snapshot.timeline import allocated_bytes
from flopwise.trace.phases import phase_of_range
from flopwise.work.operation import SAVED, TEMPORARY, UNKNOWN, WORKSPACE


class KnownAllocations:
    """What is known of each allocation of one device, in the order of its table."""

    def __init__(self, snapshot: Snapshot, device: DeviceHistory, knowledge: Knowledge) -> None:
        self.knowledge, self._word = knowledge, knowledge.word
        index = {(tensor.event, tensor.address): tensor for tensor in knowledge.tensors}
        table = device.allocations
        places = zip(table["start"].to_list(), table["address"].to_list(), strict=True)
        known = zip(map(index.get, places), table["bytes"].to_list(), strict=True)
        # A tensor that does not fit was freed before the recording, and another got its address: cuBLAS's workspace, say.
        self.tensors: list[KnownTensor | None] = [
            tensor if tensor is not None and (knowledge.exact or tensor.bytes <= size) else None
            for tensor, size in known
        ]
        self._labels = [snapshot.hints[number] for number in table["hint"].to_list()]

    def _op(self, label: str) -> KnownOp | None:
        number = label.removeprefix(OP)
        return self.knowledge.ops.get(int(number)) if label != number and number.isdecimal() else None

    def phase_of_label(self, label: str) -> str | None:
        """The phase of a label of the program: an op's number, or a phase's own name."""
        op = self._op(label)
        return self._word(op.phase) if op is not None else phase_of_range(label)

    def owners(self, derived: Ints, device: DeviceHistory) -> Ints:
        """The owners that are known, and the derived ones for the rest.

        If every op was watched, what is not a tensor is a kernel's own while its op runs; what outlives the op, or was
        there before, is a library's workspace.
        """
        owner = derived.copy()
        start = device.allocations["start"].to_numpy()
        ends = np.minimum(device.allocations["end"].to_numpy(), device.events - 1)
        at_end = device.event_hints[ends] if device.events else ends
        within_op = at_end == device.allocations["hint"].to_numpy()  # the op was still running when it was freed
        codes = {name: i for i, name in enumerate(OWNERS)}
        for row, tensor in enumerate(self.tensors):
            if tensor is not None:
                owner[row] = codes.get(self._word(tensor.owner), codes[UNKNOWN])
            elif self.knowledge.watched and start[row] == BEFORE:
                owner[row] = codes[WORKSPACE]
            elif self.knowledge.watched and self._labels[row].startswith(OP):
                owner[row] = codes[TEMPORARY if within_op[row] else WORKSPACE]
        return owner

    def kind(self, row: int) -> tuple[object, ...]:
        """What allocations of one kind have in common: op, module without its layer, shape."""
        details = self.details(row)
        return details["op"], without_layer(details["module"]), details["shape"]

    def details(self, row: int) -> dict[str, Any]:
        """Op, module, shape, dtype of an allocation, and which ops had it saved."""
        tensor = self.tensors[row]
        if tensor is None:  # a kernel's own, or a library's
            op = self._op(self._labels[row])
            known = {"op": self._word(op.op), "module": self._word(op.module)} if op else {"op": "", "module": ""}
            return known | {"shape": (), "dtype": "", "saved_by": ""}
        words = {name: self._word(getattr(tensor, name)) for name in ("op", "module", "dtype", "saved_by")}
        return words | {"shape": tensor.shape}

    def temporary(self, there: Flags, owner: Ints, device: DeviceHistory) -> tuple[OpBytes, ...]:
        """Of the allocations that are there: the temporary ones by the op that made them, and type."""
        size = device.allocations["bytes"].to_numpy()
        kinds: dict[tuple[str, str], list[int]] = {}
        for row in np.flatnonzero(there & (owner == OWNERS.index(TEMPORARY))).tolist():
            details = self.details(row)
            kinds.setdefault((details["op"], details["dtype"]), []).append(int(size[row]))
        return by_op(kinds)

    def kept(self, there: Flags, owner: Ints) -> list[SavedTensor]:
        """Of the allocations that are there when backward begins: what forward keeps for it."""
        rows = [row for row in np.flatnonzero(there).tolist() if OWNERS[owner[row]] in SAVED]
        known = [(row, tensor) for row in rows if (tensor := self.tensors[row]) is not None]
        return [SavedTensor(bytes=t.bytes, owner=OWNERS[owner[row]], **self.details(row)) for row, t in known]


def exact_history(device: DeviceHistory, known: KnownAllocations) -> DeviceHistory:
    """The history with the bytes that were requested: what the CPU allocates; it reserves nothing beyond it."""
    sizes = [tensor.bytes if tensor is not None else -1 for tensor in known.tensors]
    table = device.allocations
    exact = np.where(np.array(sizes) >= 0, sizes, table["requested_bytes"].to_numpy()).astype(np.int64)
    table = table.with_columns(bytes=pl.Series(exact), requested_bytes=pl.Series(exact))
    return replace(device, allocations=table, reserved_bytes=allocated_bytes(table, device.events + 1))
