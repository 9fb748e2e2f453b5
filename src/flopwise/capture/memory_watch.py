"""Watches a step on real tensors: the dry run's tracker, with what only a real run has: times, stacks, addresses."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flopwise.capture.watch.gradient_sums import GradientSum
from flopwise.capture.watch.modules import ModuleNames
from flopwise.capture.watch.op_facts import OpFacts
from flopwise.capture.watch.tape import Section, Storage
from flopwise.capture.watch.tracker import Tracker
from flopwise.records.memory import OP
from flopwise.torch_private import (
    current_autograd_node,
    gather_traceback,
    last_node_number,
    storage_key,
    symbolize_tracebacks,
    use_counts,
)

_MOST_SAVERS = 3  # ops that are named for one saved tensor


class Recorder(Tracker):
    """A tracker of real tensors. `say`: is told the number of each op before it runs, as CUDA's allocator wants it.

    `on_gpu`: the allocator's own record counts, so sums of gradients must run in place where autograd would have done so.
    The first step shows which; later steps repeat a sum that looks the same.
    """

    def __init__(
        self, names: ModuleNames, stacks: bool = False, say: Callable[[str], None] | None = None, on_gpu: bool = False
    ) -> None:
        super().__init__(names)
        self._on_gpu = on_gpu
        self._sum_looks: tuple[object, ...] = ()  # how the last sum of gradients looked
        self._sums_seen: dict[tuple[str, int], tuple[tuple[object, ...], int]] = {}  # section, place: looks, operand
        self._n_sums = 0  # of this section
        self.times_us: list[int] = []  # of every event of the tape, in order
        self.address: dict[int, int] = {}  # storage -> where it lies
        self._stacks, self._say = stacks, say
        self._tracebacks: dict[int, Any] = {}
        self._saved: dict[int, list[int]] = {}  # storage -> the autograd nodes that saved it
        self._op_of_node: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._say is not None:
            self._say(f"{OP}{len(self.tape.ops)}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self, name: str, sections: list[Section]) -> None:
        super().begin(name, sections)
        self._n_sums = 0

    def _overwrites(self, args: tuple[Any, ...]) -> int | None:
        if not self._on_gpu:
            return None
        self._n_sums += 1
        counts = [use_counts(t) for t in args]
        self._sum_looks = (current_autograd_node().name(), args[0].shape, args[0].dtype, *counts)
        looks, operand = self._sums_seen.get((self.section.name, self._n_sums), ((), 0))
        return operand if looks == self._sum_looks else None

    def _settled(self, last: GradientSum) -> None:
        if not self._on_gpu:
            super()._settled(last)
        elif (storage := last.overwritten) is not None:
            self._sums_seen[self.section.name, self._n_sums] = (self._sum_looks, last.operands.index(storage))

    def _forget(self, kind: int, number: int) -> int:
        place = super()._forget(kind, number)
        del self.times_us[place]
        return place

    @contextmanager
    def watching_saved(self) -> Iterator[None]:
        """While open, autograd tells which tensors it keeps (a checkpoint's segments keep theirs by other means)."""
        with torch.autograd.graph.saved_tensors_hooks(self._packed, lambda tensor: tensor):
            yield

    def savers(self, number: int) -> str:
        """The ops that had a storage saved for backward, with their modules; '' if none had."""
        ops = [self.tape.ops[self._op_of_node[n]].work for n in self._saved.get(number, ()) if n in self._op_of_node]
        said = dict.fromkeys(f"{op.module}: {op.op}" if op.module else op.op for op in ops)
        return ", ".join(list(said)[:_MOST_SAVERS])

    def living(self) -> tuple[int, ...]:
        """The storages that are there now."""
        return tuple(number for number, _ in self._live.values())

    def frames(self, numbers: list[int]) -> dict[int, list[dict[str, Any]]]:
        """The stacks that made these storages, innermost frame first, as a snapshot has them."""
        there = [n for n in numbers if n in self._tracebacks]
        stacks = symbolize_tracebacks([self._tracebacks[n] for n in there])
        return dict(zip(there, stacks, strict=True))

    def _record(self, fact: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if fact.name != "detach" and current_autograd_node() is None:  # saving itself detaches
            self._op_of_node.setdefault(last_node_number(), len(self.tape.ops))
        super()._record(fact, args, kwargs, out)

    def _event(self, kind: int, number: int) -> None:
        super()._event(kind, number)
        self.times_us.append(time.time_ns() // 1000)

    def _born(self, storage: torch.UntypedStorage, record: Storage) -> None:
        number = len(self.tape.storages)
        self.address[number] = storage.data_ptr()
        if self._stacks:
            self._tracebacks[number] = gather_traceback()
        super()._born(storage, record)

    def _packed(self, tensor: Tensor) -> Tensor:
        found = self._live.get(storage_key(tensor))
        if found is not None:
            # The node that saves was made before its op ran below autograd, and is the last one made.
            self._saved.setdefault(found[0], []).append(last_node_number())
        return tensor
