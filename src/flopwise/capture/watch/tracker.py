"""Watches a step run and writes the tape: every op, every storage from birth to death."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from flopwise import torch_private
from flopwise.capture.watch import own_ops
from flopwise.capture.watch.gradient_sums import (
    ADD_IN_PLACE,
    SCATTERS,
    ZEROS,
    GradientSum,
    adds_gradients,
    may_hold_sum,
)
from flopwise.capture.watch.modules import ModuleNames
from flopwise.capture.watch.op_facts import Call, OpFacts, facts, flops_of, lists_of, tensors_in
from flopwise.capture.watch.own_ops import passing_bytes
from flopwise.capture.watch.tape import ALLOC, FREE, HOST, OP, ManyTensors, Op, Section, Storage, Tape
from flopwise.errors import FlopwiseError
from flopwise.spec.dtypes import dtype_name
from flopwise.torch_private import TorchDispatchMode, current_autograd_node, storage_key
from flopwise.work.catalogue import launches_over
from flopwise.work.operation import (
    BUFFERS,
    GRADIENTS,
    LOSS,
    MATMUL,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETERS,
    PHASES,
    WORKSPACE,
    OpWork,
)

_TAKEN_APART = ("DTensor", "AsyncCollectiveTensor")  # tensors around others
_DEVICE = torch.ops.prim.device.default
_NAMESPACES = ("prim", "profiler")  # bookkeeping, not work


@cache
def _is_composite(func: Any) -> bool:
    """Whether an op only calls others. Autograd takes it apart; in inference mode, without autograd, it comes whole."""
    return torch_private.is_composite(func)


def _check_device(t: Tensor) -> None:
    device = getattr(t, "fake_device", None)
    if device is not None and device.type == "cuda":
        raise FlopwiseError(
            f"the step makes tensors on '{device}', and a dry run has no such device",
            "use the device that the factory is given",
        )


class Tracker(TorchDispatchMode):
    """The mode that sees every op below autograd.

    `workspace_bytes`: what cuBLAS takes in each thread that needs it. `hopper`: our kernels for sm_90 are those that run.
    """

    def __init__(
        self,
        names: ModuleNames,
        swaps: dict[Any, Callable[..., Any]] | None = None,
        workspace_bytes: int = 0,
        hopper: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.section = self.tape.build
        self.names, self.swaps, self.workspace_bytes, self.hopper = names, swaps or {}, workspace_bytes, hopper
        self._sum: GradientSum | None = None  # the last op, if it is one
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # storage's address -> its number
        self._forward_module: dict[int, str] = {}  # an autograd node's sequence number -> module
        self._outside: set[int] = set()  # nodes that were made while no module ran
        self._threads: set[bool] = set()  # that have a cuBLAS workspace: the caller's (False), the backward's (True)
        self._in_optimizer = False
        self._optimizer_module = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; the guard against it would cost a tenth of the time

    # What happens when.

    def begin(self, name: str, sections: list[Section]) -> None:
        """All that follows belongs to a new section of this name."""
        self._settle_sum()
        self.label_tensors()
        self.section = Section(name)
        sections.append(self.section)

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """While open, what runs inside any optimizer's step is known as such, and so is its state."""
        handles = (
            optimizers.register_optimizer_step_pre_hook(self._optimizer_begins),
            optimizers.register_optimizer_step_post_hook(self._optimizer_ends),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _optimizer_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._in_optimizer = True

    def _optimizer_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._in_optimizer = False
        self.label_state(optimizer)

    def label_state(self, optimizer: Optimizer) -> None:
        """What an optimizer keeps, and the parameters that it keeps it for."""
        always = getattr(optimizer, "steps_on_device", False)  # flopwise's own
        for group in optimizer.param_groups:
            on_device = bool(always or group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                self._label(parameter, PARAMETERS)
                module = self._module_of(parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        host = key == "step" and value.dim() == 0 and not on_device
                        self._label(value, HOST if host else OPTIMIZER_STATE, module)

    def label_tensors(self) -> None:
        """Parameters and buffers of all modules there are."""
        for module, parameter in self.names.parameters():
            self._label(parameter, PARAMETERS, module)
        for module, buffer in self.names.buffers():
            self._label(buffer, BUFFERS, module)

    # What an op does.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        if any(kind.__name__ in _TAKEN_APART for kind in types):
            return NotImplemented  # it runs itself on tensors that are then seen here
        self._settle_sum()
        kwargs = kwargs or {}
        if func in self.swaps:
            with self, torch_private.marking_views():
                return self.swaps[func](*args, **kwargs)
        if _is_composite(func):
            with self, torch_private.marking_views():
                return torch_private.run_composite(func, args, kwargs)
        sums = adds_gradients(func, args, kwargs)
        if sums and (place := self._overwrites(args)) is not None:
            func, args = ADD_IN_PLACE, (args[place], args[1 - place])
        elif func in SCATTERS and self._into_fresh_zeros(args[0]):
            func = SCATTERS[func]
        out = func(*args, **kwargs)
        if func.namespace not in _NAMESPACES:
            self._record(facts(func), args, kwargs, out)
        if sums and func is not ADD_IN_PLACE:
            self._await_sum(args, out)
        return out

    # Sums of gradients.

    def _overwrites(self, args: tuple[Any, ...]) -> int | None:
        """Which operand of a sum of gradients to add the other to; None: the tape will show what autograd had done."""
        return None

    def _await_sum(self, args: tuple[Any, ...], out: Tensor) -> None:
        storage, address = self._number(out), storage_key(out)
        if storage is not None:
            operands = [self._number(t) if may_hold_sum(t) else None for t in args]
            self._sum = GradientSum(len(self.tape.ops) - 1, storage, address, operands)

    def _settle_sum(self) -> None:
        """Something else happens: what was not freed by now is held by someone else than autograd."""
        last, self._sum = self._sum, None
        if last is not None:
            self._settled(last)

    def _settled(self, last: GradientSum) -> None:
        """Write a sum into the operand that autograd would have written it into."""
        target = last.overwritten
        if target is None:
            return
        self._forget(FREE, target)
        self._forget(ALLOC, last.storage)
        made = self.tape.storages.pop()
        kept, op = self.tape.storages[target], self.tape.ops[last.op]
        kept.label = kept.label or made.label
        self._live[last.address] = (target, self._live[last.address][1])
        writes = tuple((target, nbytes) for _, nbytes in op.work.writes)
        op.work = msgspec.structs.replace(op.work, op="add_", writes=writes)

    def _forget(self, kind: int, number: int) -> int:
        """Take back an event that was written down lately; tells its place, counted from the end."""
        place = -1 - self.section.events[::-1].index((kind, number))
        del self.section.events[place]
        return place

    def _into_fresh_zeros(self, t: Tensor) -> bool:
        """Whether a backward formula has just made this tensor of zeros."""
        storage = self._storage_of(t)
        if storage is None or torch.is_grad_enabled() or current_autograd_node() is None:
            return False
        made_by = self.tape.ops[storage.op].work
        return made_by.phase == "backward" and made_by.op in ZEROS

    def _record(self, fact: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = tensors_in((*args, *kwargs.values())) if kwargs else tensors_in(args)
        outputs = tensors_in(out if isinstance(out, list | tuple) else (out,))
        if self._on_host(inputs):
            self._new_storages(outputs, len(self.tape.ops) - 1, ())
            self._label_all(outputs, HOST)
            return
        node = current_autograd_node()
        phase = self._phase(fact, node is not None)
        module = self._module(phase, node, inputs, fact.over_lists)
        number = len(self.tape.ops)
        if not fact.is_view:
            self._new_storages(outputs, number, args[0] if fact.over_lists else ())
        if phase != OPTIMIZER and _accumulates(node):
            self._label_all(outputs, GRADIENTS, module)
        passing = self._passing(fact, args, inputs, number, in_backward=node is not None)
        whole = self._op(fact, args, kwargs, out, inputs, outputs, phase, module)
        parts = own_ops.loss_parts(whole.work, args) if fact.name == own_ops.LOSS_OP else ()
        for op in [Op(part) for part in parts] or [whole]:
            self._event(OP, len(self.tape.ops))
            self.tape.ops.append(op)
        if passing is not None:
            self._event(FREE, passing)

    def _event(self, kind: int, number: int) -> None:
        if kind == FREE and self._sum is not None:
            self._sum.freed.add(number)
        self.section.events.append((kind, number))

    def _op(
        self,
        fact: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        phase: str,
        module: str,
    ) -> Op:
        call, kernels = Call(fact, args, inputs, outputs), 0
        many = self._positions(fact, args, outputs) if fact.over_lists else ()
        lists = lists_of(fact, args) if many else 0
        if many:
            kernels = launches_over(fact.name, [each.elements for each in many], lists)
            read, written = sum(each.read_bytes for each in many), sum(each.write_bytes for each in many)
        else:
            kernels = call.launches
            read, written = call.moved_bytes if kernels else (0, 0)
        work = OpWork(
            op=fact.shown,
            module=module,
            phase=phase,
            kind=OPTIMIZER if fact.over_lists and phase == OPTIMIZER else fact.kind,
            dtype=call.dtype,
            flops=flops_of(call, args, kwargs, out),
            read_bytes=read,
            write_bytes=written,
            kernels=kernels,
            strided=call.strided,
            mixed=call.mixed,
            outside=self._is_outside(phase),
            whole=fact.causal is not None and not _argument(args, kwargs, *fact.causal),
            reads=self._numbered(inputs) if kernels else (),
            writes=self._numbered(outputs) if kernels else (),
            shapes=() if fact.over_lists else own_ops.factor_shapes(fact.name, args) or call.shapes,
        )
        return Op(work, many, lists)

    def _numbered(self, tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
        """(storage, bytes of it) of each tensor whose storage is known; of an expanded one, no more than there is."""
        known = {storage_key(t): t for t in tensors}
        found = []
        for address, t in known.items():
            if address in self._live:
                storage = self._live[address][0]
                found.append((storage, min(t.numel() * t.element_size(), self.tape.storages[storage].nbytes)))
        return tuple(found)

    def _positions(self, fact: OpFacts, args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[ManyTensors, ...]:
        """Position by position, what an op over lists of tensors reads and writes."""
        first = [t for t in args[0] if isinstance(t, Tensor)]
        lists = [a for a in args if isinstance(a, list | tuple) and len(a) == len(first) and isinstance(a[0], Tensor)]
        results = [outputs] if len(outputs) == len(first) else []
        written = _written_lists(fact, args, lists) if fact.written else results
        return tuple(
            ManyTensors(
                elements=t.numel(),
                module=self._module_of(t),
                read_bytes=sum({_place(a[i]): a[i].nbytes for a in lists}.values()),
                write_bytes=sum(a[i].nbytes for a in written),
            )
            for i, t in enumerate(first)
        )

    def _phase(self, fact: OpFacts, in_backward: bool) -> str:
        if self._in_optimizer:
            return OPTIMIZER
        if in_backward:
            # The engine runs with gradients off and outside of all modules. Only a checkpoint that computes its segment
            # again turns gradients on (but for the inside of an autograd.Function) and enters modules.
            return "recompute" if torch.is_grad_enabled() or self.names.stack else "backward"
        named = self.section.name
        return LOSS if fact.kind == LOSS else named if named in PHASES else "forward"

    def _module(self, phase: str, node: Any, inputs: list[Tensor], many: bool) -> str:
        if phase == "backward":
            if node is None:
                return ""
            if _accumulates(node):
                return self._module_of(node.variable)
            return self._forward_module.get(torch_private.node_number(node), "")
        if phase == OPTIMIZER:
            if many:
                return ""
            if inputs and (module := self._module_of(inputs[0])):
                self._optimizer_module = module
            return self._optimizer_module
        module = self.names.current()
        # The node of an op exists before the op runs below autograd: the last number given is its own.
        node_made = torch_private.last_node_number()
        if node_made not in self._forward_module and not self.names.stack:
            self._outside.add(node_made)
        self._forward_module.setdefault(node_made, module)
        return module

    def _is_outside(self, phase: str) -> bool:
        node = current_autograd_node()
        if phase == "backward":
            return node is not None and torch_private.node_number(node) in self._outside
        return phase in ("forward", LOSS) and not self.names.stack

    # Storages.

    def _new_storages(self, outputs: list[Tensor], op: int, many: Sequence[Tensor]) -> None:
        """`many`: the tensors that the outputs stand beside, one by one, whose modules they are given."""
        for i, t in enumerate(outputs):
            storage = t.untyped_storage()
            if storage_key(storage) not in self._live:
                _check_device(t)
                record = Storage(storage.nbytes(), tuple(t.shape), dtype_name(t.dtype), op)
                record.module = self._module_of(many[i]) if i < len(many) else ""
                self._born(storage, record)

    def _born(self, storage: torch.UntypedStorage, record: Storage) -> None:
        number, address = len(self.tape.storages), storage_key(storage)
        self.tape.storages.append(record)
        self._event(ALLOC, number)

        def dies(_: object) -> None:
            self._event(FREE, self._live.pop(address)[0])

        self._live[address] = (number, weakref.ref(storage, dies))

    def _passing(
        self, fact: OpFacts, args: tuple[Any, ...], inputs: list[Tensor], op: int, in_backward: bool
    ) -> int | None:
        """cuBLAS's workspace, if this is a thread's first matmul; and the number of what the op holds while it runs."""
        multiplies = fact.kind == MATMUL or fact.name == own_ops.LOSS_OP
        if multiplies and self.workspace_bytes and in_backward not in self._threads:
            self._threads.add(in_backward)
            self._unseen(self.workspace_bytes, op, WORKSPACE)
        nbytes = passing_bytes(fact.name, args, inputs, self.hopper) if self.workspace_bytes else 0
        if fact.name == own_ops.LOSS_OP:
            nbytes = own_ops.loss_holds(args)
        return self._unseen(nbytes, op) if nbytes else None

    def _unseen(self, nbytes: int, op: int, label: str = "") -> int:
        """A storage that has no tensor."""
        self.tape.storages.append(Storage(nbytes, (nbytes,), "uint8", op, label))
        self._event(ALLOC, len(self.tape.storages) - 1)
        return len(self.tape.storages) - 1

    def _number(self, t: Tensor) -> int | None:
        found = self._live.get(storage_key(t))
        return found[0] if found else None

    def _storage_of(self, t: Tensor) -> Storage | None:
        number = self._number(t)
        return None if number is None else self.tape.storages[number]

    def _label(self, t: Tensor, label: str, module: str = "") -> None:
        storage = self._storage_of(t)
        if storage is not None:
            storage.label, storage.module = storage.label or label, storage.module or module

    def _label_all(self, tensors: list[Tensor], label: str, module: str = "") -> None:
        for t in tensors:
            self._label(t, label, module)

    def _on_host(self, inputs: list[Tensor]) -> bool:
        """Whether an op only counts an optimizer's steps: one of its inputs stays on the CPU, and the others are scalars."""
        hosts = [storage is not None and storage.label == HOST for storage in map(self._storage_of, inputs)]
        return any(hosts) and all(host or not t.dim() for host, t in zip(hosts, inputs, strict=True))

    def _module_of(self, t: Tensor) -> str:
        storage = self._storage_of(t)
        return storage.module if storage is not None else ""


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _accumulates(node: Any) -> bool:
    """Whether an autograd node adds to a parameter's gradient."""
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _written_lists(fact: OpFacts, args: tuple[Any, ...], lists: list[Any]) -> list[Any]:
    """Those of the lists that the op changes in place."""
    changed = [args[i] for i in fact.written if i < len(args)]
    return [a for a in lists if any(a is one for one in changed)]


def _place(t: Tensor) -> tuple[int, int]:
    """One for the same tensor in two lists: AdamW multiplies the gradient by itself, and loads it once."""
    return storage_key(t), int(t.storage_offset())
