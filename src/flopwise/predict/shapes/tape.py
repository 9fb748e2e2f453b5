"""A step on shapes alone: every op with its work, and every tensor for as long as PyTorch would keep it.

This is autograd in miniature. An op records its work and allocates its output; what its derivative needs is saved with
its node; the backward pass visits nodes in PyTorch's order and frees what each has used. A tensor lives as long as
something refers to it, exactly as in Python with PyTorch, so a model written here the way `lm/` writes it has the same
peak. Nothing is computed and torch is not needed.
"""

import contextlib
import heapq
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flopwise.predict.shapes.memory import Memory, Storage, by_owner, without_layer
from flopwise.spec.dtypes import DTYPES, ITEM_BYTES
from flopwise.work.allocator import MIN_BLOCK
from flopwise.work.catalogue import operation, work_of_call
from flopwise.work.operation import ACTIVATIONS, GRADIENTS, LOGITS, SCORES, TEMPORARY, Footprint, OpWork
from flopwise.work.tensor import Shape

FAMILIES = (SCORES, LOGITS)  # what is computed from these, number by number, has the same owner

Gradients = Sequence["Tensor | None"]
Backward = Callable[["Tape", "Tensor", Sequence["Tensor"]], Gradients]


class Tensor:
    """A shape with a dtype, a place in memory and a place in the graph."""

    __slots__ = ("dtype", "elements", "family", "n_bytes", "node", "shape", "slot", "storage")

    def __init__(self, shape: Shape, dtype: str, storage: Storage, family: str = "") -> None:
        self.shape, self.dtype, self.storage, self.family = shape, dtype, storage, family
        self.node: Node | None = None
        self.slot = 0
        self.elements = math.prod(shape)
        # A view may spread one number over many places: no more is read than there is.
        self.n_bytes = min(self.elements * ITEM_BYTES[dtype], storage.n_bytes)

    def view(self, shape: Shape) -> "Tensor":
        """The same memory in another shape, outside the graph."""
        return Tensor(shape, self.dtype, self.storage, self.family)


class Saved:
    """What one op keeps for its derivative; in a checkpointed segment only its place, until that is computed again."""

    __slots__ = ("place", "segment", "tensors")

    def __init__(self, tensors: Sequence[Tensor], segment: "Segment | None" = None, place: int = 0) -> None:
        self.tensors, self.segment, self.place = tensors, segment, place


class Segment:
    """A checkpointed stretch of the model: how to compute it again, and the places of what it would have saved."""

    def __init__(self, again: Callable[[], object]) -> None:
        self.again = again
        self.n_places = 0
        self.refilled: dict[int, Sequence[Tensor]] | None = None


class _Enough(Exception):
    """Not an error: everything the backward pass needs has been computed again."""


class Node:
    """One op's place in the graph, with the way back."""

    __slots__ = ("backward", "edges", "module", "order", "saved")

    def __init__(
        self, order: int, module: str, edges: list["Edge | None"], backward: Backward, saved: Saved | None
    ) -> None:
        self.order, self.module, self.edges, self.backward, self.saved = order, module, edges, backward, saved


class Parameter(Node):
    """The end of a path: a weight and its gradient."""

    __slots__ = ("gradient", "name", "weight")

    def __init__(self, name: str, weight: Tensor) -> None:
        super().__init__(sys.maxsize, name, [], _no_way_back, None)  # visited as soon as it is reached
        self.name, self.weight = name, weight
        self.gradient: Tensor | None = None


Edge = tuple[Node, int, Shape, str]  # node, which of its outputs, and what a gradient for it must look like


def _no_way_back(tape: "Tape", grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
    raise AssertionError("a parameter has no derivative of its own")


def _mixed(tensors: Sequence[Tensor]) -> bool:
    """Whether they have several floating dtypes."""
    first = tensors[0].dtype
    for one in tensors:
        if one.dtype != first:
            return len({i.dtype for i in tensors if i.shape and DTYPES[i.dtype].floating}) > 1
    return False


class Tape(Memory):
    """The memory, the list of work, and the graph of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpWork] = []
        self.phase, self.module = "forward", ""
        self.grad_enabled = True
        self.autocast = ""  # a dtype
        self.casts: dict[int, Tensor] = {}  # autocast's copies of weights, until its context ends
        self.order = 0
        self.segment: Segment | None = None
        self.refilling = False
        self.on_gradient: Callable[[Parameter], None] = lambda parameter: None  # called when a weight has its gradient

    def tensor(self, shape: Shape, dtype: str, owner: str = "", op: str = "") -> Tensor:
        """A new tensor; without an owner a temporary one."""
        n_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        storage = Storage(self, n_bytes, (owner or TEMPORARY, without_layer(self.module), op))
        return Tensor(shape, dtype, storage, owner if owner in FAMILIES else "")

    def footprint(self, moment: str, at_peak: bool = False) -> Footprint:
        """What lives now, or lived at the phase's peak, by owner."""
        return Footprint(moment=moment, phase=self.phase, owners=by_owner(self.peak if at_peak else self.live))

    # --- work: what an op does, the catalogue says

    def run(
        self,
        op: str,
        inputs: Sequence[Tensor],
        shape: Shape,
        dtype: str,
        *,
        compute: str = "",
        family: str = "",
        also: Sequence[Tensor] = (),
        strided: bool = False,
        like: str = "",
    ) -> Tensor:
        """Do one op: its output is allocated and its work written down. `also`: further results, which the caller has made."""
        if not family:
            family = next((i.family for i in inputs if i.family and i.shape == shape), "")
        out = self.tensor(shape, dtype, family, op)
        self.work(op, inputs, (out, *also), compute or dtype, strided=strided, like=like)
        return out

    def work(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outs: Sequence[Tensor],
        dtype: str,
        *,
        args: Sequence[Tensor | None] | None = None,
        reads: Sequence[Tensor] | None = None,
        shapes: tuple[Shape, ...] = (),
        strided: bool = False,
        like: str = "",
        done: int = 0,
        touched: int | None = None,
    ) -> None:
        """Write down what an op does. In place, `outs` are among the inputs.

        `args`: the inputs by their place in the op's schema, where that matters; `reads`: tensors that stand for what it
        reads; `like`: the op in the catalogue that it is; `done`: launches that were written down before, as ops of
        their own; `touched`: bytes written, where the rest of the result is.
        """
        entry, given = operation(like or op), inputs if reads is None else reads
        placed = inputs if args is None else args
        n_flops, read, written, kernels = work_of_call(entry, placed, inputs, outs)
        for one in given:
            if 2 * one.n_bytes <= one.storage.n_bytes > MIN_BLOCK and one.shape:
                strided = True
        self.ops.append(
            OpWork(
                op=op,
                module=self.module,
                phase=self.phase,
                kind=entry.kind,
                dtype=dtype,
                flops=n_flops,
                read_bytes=read,
                write_bytes=written if touched is None else touched,
                kernels=kernels - done,
                strided=strided,
                mixed=len(given) > 1 and _mixed(given),
                shapes=shapes or tuple([i.shape for i in given]),
                reads=tuple([(i.storage.number, i.n_bytes) for i in given]),
                writes=tuple([(w.storage.number, w.n_bytes if touched is None else touched) for w in outs]),
            )
        )

    def work_of(
        self, op: str, kind: str, read: int, written: int, dtype: str, kernels: int, *shapes: Shape, **more: Any
    ) -> None:
        """Write work down by its bytes alone."""
        self.ops.append(
            OpWork(
                op=op,
                module=self.module,
                phase=self.phase,
                kind=kind,
                dtype=dtype,
                read_bytes=read,
                write_bytes=written,
                kernels=kernels,
                shapes=shapes,
                **more,
            )
        )

    # --- graph

    def wants(self, tensor: Tensor) -> bool:
        """Whether a gradient must reach this tensor."""
        return self.grad_enabled and tensor.node is not None

    def save(self, *tensors: Tensor) -> Saved | None:
        """Keep tensors for a derivative. Called where PyTorch does: inputs before the op runs, results after."""
        segment = self.segment
        if segment is None:
            return Saved([self._kept(t) for t in tensors])
        if not self.refilling:
            segment.n_places += 1
            return Saved((), segment, segment.n_places - 1)
        assert segment.refilled is not None
        segment.refilled[len(segment.refilled)] = [self._kept(t) for t in tensors]
        if len(segment.refilled) == segment.n_places:
            raise _Enough
        return None

    def _kept(self, tensor: Tensor) -> Tensor:
        if tensor.storage.key[0] == TEMPORARY:
            tensor.storage.now_owned_by(ACTIVATIONS)
        return tensor.view(tensor.shape)

    def connect(self, out: Tensor, inputs: Sequence[Tensor], backward: Backward, saved: Saved | None = None) -> Tensor:
        """Put an op's output into the graph, if a gradient has to come back through it."""
        if not self.grad_enabled or all(i.node is None for i in inputs):
            return out
        self.order += 1
        edges = [None if i.node is None else (i.node, i.slot, i.shape, i.dtype) for i in inputs]
        out.node = Node(self.order, self.module, edges, backward, saved)
        return out

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        """Visit every node from the loss down, the latest first; gradients accumulate as PyTorch's engine does it."""
        assert loss.node is not None
        module, waiting = self.module, _uses(loss.node)
        grads: dict[Node, dict[int, Tensor]] = {loss.node: {0: seed}}
        seed.storage.gradients = 1
        ready: list[tuple[int, int, Node]] = [(-loss.node.order, 0, loss.node)]
        loss.node, count, self.grad_enabled = None, 0, False
        while ready:
            node = heapq.heappop(ready)[2]
            self.module = node.module
            for edge, grad in self._visit(node, grads.pop(node)):
                target, slot = edge[:2]
                if grad is not None:
                    self._accumulate(grads.setdefault(target, {}), slot, grad)
                waiting[target] -= 1
                if not waiting[target] and target in grads:
                    count += 1
                    heapq.heappush(ready, (-target.order, count, target))
                del grad
        self.module, self.grad_enabled = module, True

    def _visit(self, node: Node, arrived: dict[int, Tensor]) -> list[tuple[Edge, Tensor | None]]:
        results: Gradients
        found: list[tuple[Edge, Tensor | None]]
        if isinstance(node, Parameter):
            self._keep_gradient(node, arrived.pop(0))
            self.on_gradient(node)
            return []
        for slot in arrived:  # from here on it is the node's alone
            arrived[slot].storage.gradients -= 1
        if len(arrived) == 1 and 0 in arrived:
            results = node.backward(self, arrived.pop(0), self._unpack(node.saved))
        else:  # an op with several outputs gets all their gradients
            pieces = [arrived[i] for i in sorted(arrived)]
            arrived.clear()
            results = node.backward(self, pieces[0], pieces)
            del pieces
        left, found = list(results), []
        del results
        for i, edge in enumerate(node.edges):
            grad, left[i] = left[i], None
            if edge is not None:
                found.append((edge, None if grad is None else self._shaped(grad, edge[2], edge[3])))
        node.saved = None
        node.edges = []
        return found

    def _unpack(self, saved: Saved | None) -> Sequence[Tensor]:
        if saved is None:
            return ()
        segment = saved.segment
        if segment is None:
            return saved.tensors
        if segment.refilled is None:
            self._compute_again(segment)
        assert segment.refilled is not None
        return segment.refilled.pop(saved.place)

    def _compute_again(self, segment: Segment) -> None:
        phase, module, segment.refilled = self.phase, self.module, {}
        self.phase, self.segment, self.refilling, self.grad_enabled = "recompute", segment, True, True
        with contextlib.suppress(_Enough):
            segment.again()
        self.phase, self.module = phase, module
        self.segment, self.refilling, self.grad_enabled = None, False, False

    def _accumulate(self, buffer: dict[int, Tensor], slot: int, grad: Tensor) -> None:
        """Add a gradient to the one that waits, in place if no other gradient lies in the same memory."""
        if slot not in buffer:
            buffer[slot] = grad
            return
        old = buffer[slot]
        grad.storage.gradients -= 1
        if self.may_overwrite(old):
            self.work("add_", (old, grad), (old,), old.dtype)
        else:
            old.storage.gradients -= 1
            buffer[slot] = self.run("add", (old, grad), old.shape, old.dtype)
            buffer[slot].storage.gradients = 1

    @staticmethod
    def may_overwrite(waiting: Tensor) -> bool:
        """Whether a gradient is the only one in its memory that waits for a node or stays with a weight."""
        return waiting.storage.gradients == 1

    def _keep_gradient(self, parameter: Parameter, grad: Tensor) -> None:
        if parameter.gradient is None:
            grad.storage.now_owned_by(GRADIENTS)
            parameter.gradient = grad
        else:
            grad.storage.gradients -= 1
            self.work("add_", (parameter.gradient, grad), (parameter.gradient,), grad.dtype)

    def _shaped(self, grad: Tensor, shape: Shape, dtype: str) -> Tensor:
        """What was broadcast forward is summed on the way back, and a gradient has its tensor's dtype."""
        if grad.shape != shape:
            grad = self.run("sum", (grad,), shape, grad.dtype)
        if grad.dtype != dtype:
            grad = self.run("to", (grad,), shape, dtype)
        grad.storage.gradients += 1
        return grad.view(shape)  # each buffer its own tensor

    # --- contexts

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Ops in here belong to the module `name`, below the one they are in."""
        outer = self.module
        self.module = f"{outer}.{name}" if outer else name
        try:
            yield
        finally:
            self.module = outer

    @contextlib.contextmanager
    def no_grad(self) -> Iterator[None]:
        outer, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = outer

    @contextlib.contextmanager
    def casting_to(self, dtype: str) -> Iterator[None]:
        """Autocast: matmuls in `dtype` (nothing where it is empty); its copies of weights live until the end."""
        outer, casts, self.autocast, self.casts = self.autocast, self.casts, dtype, {}
        try:
            yield
        finally:
            self.autocast, self.casts = outer, casts

    def checkpoint(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a stretch of the model keeping its input alone."""
        dtype, module = self.autocast, self.module

        def again() -> object:
            self.module = module
            with self.casting_to(dtype):
                return run(x)

        self.segment = Segment(again)
        try:
            return run(x)
        finally:
            self.segment = None


def _uses(root: Node) -> dict[Node, int]:
    """How many gradients each node below `root` waits for."""
    waiting: dict[Node, int] = {}
    seen, todo = {root}, [root]
    while todo:
        for edge in todo.pop().edges:
            if edge is not None:
                waiting[edge[0]] = waiting.get(edge[0], 0) + 1
                if edge[0] not in seen:
                    seen.add(edge[0])
                    todo.append(edge[0])
    return waiting
