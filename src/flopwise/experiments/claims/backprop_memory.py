"""`backprop-memory`: what each operation of a graph keeps for its backward pass, and what three sigmoids read and write.

A hook sees every tensor that an operation saves for backward. The lecture's three sigmoids are also run as programs that load
from and store to a memory that counts: with the results of the forward pass kept, and computed again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import one_line
from flopwise.experiments.experiment import Axis, Experiment, Picture, bar, columns, span, table_of
from flopwise.experiments.rows import Row, by, fields, select
from flopwise.experiments.verdict import Check, each, holds, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench

    Operation = Callable[[Tensor], Tensor]

LINE = "What each operation keeps for backward, and the reads and writes of three sigmoids, kept or computed again."
CLAIM = (
    "An operation keeps what its gradient needs: an add nothing, a sigmoid its output, a square its input; three sigmoids keep "
    "three tensors, or one when computed again, and then as fused kernels make 5 memory accesses instead of 8."
)
NOTHING, INPUT, OUTPUT, OTHER = WORDS = ("nothing", "its input", "its output", "something else")
EXPECTED = {"add": NOTHING, "sigmoid": OUTPUT, "square": INPUT}
KEPT, AGAIN, COMPILED = "eager, kept", "eager, computed again", "torch.compile"
ACCESSES = {"fused, kept": 8, "fused, computed again": 5}  # the lecture's
GRADIENT = (6.0, 12.0)  # the lecture's, at w = (3, 1), φ = (1, 2), y = 2
WRONG = 1e-6


class Kept(Row, frozen=True, kw_only=True, tag_field="part", tag="kept"):
    """One operation on a tensor of `input_bytes`."""

    operation: str
    what: str
    tensors: int
    kept_bytes: int
    other: str  # shapes and dtypes of what is neither input nor output
    input_bytes: int


class Sigmoids(Row, frozen=True, kw_only=True, tag_field="part", tag="sigmoids"):
    way: str
    tensors: int | None = None  # kept for backward
    kept_bytes: int | None = None
    reads: int | None = None
    writes: int | None = None
    off: float = 0.0
    note: str = ""

    @property
    def accesses(self) -> int | None:
        return None if self.reads is None or self.writes is None else self.reads + self.writes


class Gradient(Row, frozen=True, kw_only=True, tag_field="part", tag="gradient"):
    """A node of the lecture's graph: its value, and the loss's gradient by it."""

    node: str
    forward: list[float]
    backward: list[float]


Rows = Sequence[Kept | Sigmoids | Gradient]


def measure(bench: "Bench") -> Iterator[Kept | Sigmoids | Gradient]:
    bench.doing("the lecture's graph")
    yield from _lecture(bench)
    for name, operation in _operations(bench).items():
        bench.doing(name)
        x = bench.randn(256, 1024).abs().add(0.1).requires_grad_()
        saved, result = _saved(operation, x)
        yield Kept(operation=name, **_described(saved, x, result), input_bytes=x.nbytes)
    yield from _sigmoids(bench)


def _operations(bench: "Bench") -> "dict[str, Operation]":
    """Operations of a Transformer, each a function of one tensor."""
    import torch
    from torch.nn import functional

    weight = bench.randn(1024, 1024, requires_grad=True)
    other, target = bench.randn(256, 1024), torch.arange(256, device=bench.device)
    return {
        "add": lambda x: x + other,
        "scale": lambda x: 2.0 * x,
        "square": lambda x: x**2,
        "sqrt": torch.sqrt,
        "exp": torch.exp,
        "log": torch.log,
        "sin": torch.sin,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "ReLU": torch.relu,
        "SiLU": functional.silu,
        "GeLU": functional.gelu,
        "softmax": lambda x: torch.softmax(x, -1),
        "dropout": lambda x: functional.dropout(x, 0.1),
        "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
        "linear": lambda x: x @ weight,
        "cross entropy": lambda x: functional.cross_entropy(x, target),
    }


def _saved(operation: "Operation", x: "Tensor") -> "tuple[list[Tensor], Tensor]":
    """What autograd keeps while an operation runs, and its result. Weights are there anyway, and not counted."""
    import torch

    saved: list[Tensor] = []

    def keep(tensor: "Tensor") -> "Tensor":
        is_weight = tensor.is_leaf and tensor.requires_grad and tensor is not x
        saved.extend([] if is_weight else [tensor.detach()])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = operation(x)
    return saved, result


def _described(saved: "Sequence[Tensor]", x: "Tensor", result: "Tensor") -> dict[str, Any]:
    """Which of these are the input or the output, their count and bytes; each storage once."""
    places = {tensor.data_ptr(): tensor for tensor in saved}
    named = {x.data_ptr(): INPUT, result.data_ptr(): OUTPUT}
    rest = [tensor for place, tensor in places.items() if place not in named]
    what = " and ".join(word for place, word in named.items() if place in places) or (OTHER if rest else NOTHING)
    other = ", ".join(f"{'×'.join(map(str, t.shape)) or '1'} {str(t.dtype).removeprefix('torch.')}" for t in rest)
    kept = sum(tensor.nbytes for tensor in places.values())
    return {"what": what, "tensors": len(places), "kept_bytes": kept, "other": other}


def _lecture(bench: "Bench") -> Iterator[Gradient]:
    """(w · φ − y)² at w = (3, 1), φ = (1, 2), y = 2."""
    import torch

    w = torch.tensor([3.0, 1.0], device=bench.device, requires_grad=True)
    score = w.dot(torch.tensor([1.0, 2.0], device=bench.device))
    residual = score - 2.0
    loss = residual**2
    nodes = {"w": w, "w · φ": score, "residual": residual, "loss": loss}
    slopes = torch.autograd.grad(loss, list(nodes.values()))
    for (name, node), slope in zip(nodes.items(), slopes, strict=True):
        yield Gradient(node=name, forward=_floats(node), backward=_floats(slope))


def _floats(x: "Tensor") -> list[float]:
    return [float(value) for value in x.detach().flatten()]


def _sigmoids(bench: "Bench") -> Iterator[Sigmoids]:
    import torch
    from torch.utils.checkpoint import checkpoint

    def three(x: "Tensor") -> "Tensor":
        return x.sigmoid().sigmoid().sigmoid()

    x, dy = bench.randn(256, 1024, requires_grad=True), bench.randn(256, 1024)
    (right,) = torch.autograd.grad(three(x), x, dy)
    for name, program in (("fused, kept", keeping), ("fused, computed again", recomputing)):
        memory = Memory(x=x.detach(), dy=dy)
        kept = program(memory)
        off = float((memory.there["dx"] - right).abs().max())
        size = sum(memory.there[one].nbytes for one in kept)
        yield Sigmoids(way=name, tensors=len(kept), kept_bytes=size, reads=memory.reads, writes=memory.writes, off=off)
    # The reentrant checkpoint, because a hook sees what it keeps.
    ways: dict[str, Operation] = {KEPT: three, AGAIN: lambda x: checkpoint(three, x, use_reentrant=True)}
    if bench.on_gpu or not bench.quick:
        ways[COMPILED] = torch.compile(three)
    for name, way in ways.items():
        bench.doing(f"three sigmoids, {name}")
        x.grad = None
        try:
            saved, result = _saved(way, x)
            result.backward(dy)
            off = float((x.grad - right).abs().max())  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001  whatever the compiler raises is a row
            yield Sigmoids(way=name, note=one_line(f"{type(error).__name__}: {error}")[:200])
            continue
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in saved}
        yield Sigmoids(way=name, tensors=len(sizes), kept_bytes=sum(sizes.values()), off=off)


class Memory:
    """Tensors by name; counts loads and stores."""

    def __init__(self, **there: "Tensor") -> None:
        self.there, self.reads, self.writes = dict(there), 0, 0

    def load(self, *names: str) -> "list[Tensor]":
        self.reads += len(names)
        return [self.there[name] for name in names]

    def store(self, **new: "Tensor") -> None:
        self.writes += len(new)
        self.there |= new


def keeping(memory: Memory) -> tuple[str, ...]:
    """Three sigmoids forward in one kernel and backward in another; returns what is kept between them."""
    (x,) = memory.load("x")
    first = x.sigmoid()
    second = first.sigmoid()
    memory.store(first=first, second=second, y=second.sigmoid())
    first, second, dy = memory.load("first", "second", "dy")
    memory.store(dx=dy * _slope(first, second))
    return ("first", "second")


def recomputing(memory: Memory) -> tuple[str, ...]:
    """As above, but the backward kernel begins with x again."""
    (x,) = memory.load("x")
    memory.store(y=x.sigmoid().sigmoid().sigmoid())
    x, dy = memory.load("x", "dy")
    memory.store(dx=dy * _slope(x.sigmoid(), x.sigmoid().sigmoid()))
    return ("x",)


def _slope(first: "Tensor", second: "Tensor") -> "Tensor":
    """s' = s (1 − s) of each of the three; the third comes from the second."""
    third = second.sigmoid()
    return first * (1 - first) * second * (1 - second) * third * (1 - third)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    kept, ways = by(select(rows, Kept), "operation"), by(select(rows, Sigmoids), "way")
    nodes = by(select(rows, Gradient), "node")
    counted = {way: row for way, row in ways.items() if row.tensors is not None}
    complete = set(EXPECTED) <= set(kept) and {KEPT, AGAIN, *ACCESSES} <= set(counted) and "w" in nodes
    yield require("all of it", complete, f"only {len(kept)} operations and {len(counted)} ways were measured.")
    wrong = ", ".join(way for way, row in counted.items() if not row.off <= WRONG)
    yield require("right gradients", not wrong, f"wrong gradients of three sigmoids: {wrong}.")
    yield from _kept(kept)
    yield from _counted(counted)
    gradient = tuple(nodes["w"].backward)
    yield said(f"The lecture's gradient is [{', '.join(f'{value:g}' for value in gradient)}].")
    yield holds("the lecture's gradient", gradient == GRADIENT)


def _kept(kept: Mapping[str, Kept]) -> Iterator[Check]:
    groups = {what: [name for name, row in kept.items() if row.what == what] for what in (NOTHING, OUTPUT, INPUT)}
    yield said(" ".join(f"Keeping {what}: {', '.join(names)}." for what, names in groups.items()))
    as_claimed = {name: kept[name].what == what for name, what in EXPECTED.items()}
    yield each("what is kept", as_claimed, refuted="Keeps something else: {}.")


def _counted(ways: Mapping[str, Sigmoids]) -> Iterator[Check]:
    tensors = ", ".join(f"{ways[way].tensors} ({way})" for way in (KEPT, AGAIN, COMPILED) if way in ways)
    accesses = " and ".join(f"{ways[way].accesses} accesses ({way})" for way in ACCESSES)
    yield said(f"Three sigmoids keep so many tensors: {tensors}. As two kernels they make {accesses}.")
    yield holds("three or one", (ways[KEPT].tensors, ways[AGAIN].tensors) == (3, 1))
    yield each("8 or 5", {way: ways[way].accesses == n for way, n in ACCESSES.items()}, refuted="Other accesses: {}.")


def draw(rows: Rows, place: Place) -> list[Picture]:
    kept = [
        {"operation": row.operation, "what": row.what, "from": 0.0, "times": row.kept_bytes / row.input_bytes}
        for row in select(rows, Kept)
        if row.input_bytes
    ]
    accesses = [
        {"way": row.way, "count": count, "what": what}
        for row in select(rows, Sigmoids)
        for what, count in (("reads", row.reads), ("writes", row.writes), ("tensors kept", row.tensors))
        if count is not None
    ]
    return [
        span(kept, Axis("from", "times the input", to="times"), Axis("operation"), colour="what", words=WORDS).titled(
            "What an operation keeps for backward",
            "Weights not counted. An output is often the next operation's input, and then kept once for both.",
        ),
        bar(accesses, Axis("way"), Axis("count", "of the input's size"), colour="what").titled(
            "Three sigmoids", "Computed again, a tensor less is written and one less is read: 5 of 8 accesses are left."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    def numbers(given: Sequence[float]) -> str:
        return ", ".join(units.significant(value) for value in given)

    operations = columns("operation", what="keeps", tensors="tensors", kept_bytes="size", other="and besides")
    sigmoids = columns("way", tensors="tensors kept", kept_bytes="size", reads="reads", writes="writes", off="error")
    nodes = [
        {"node": row.node, "forward": numbers(row.forward), "backward": numbers(row.backward)}
        for row in select(rows, Gradient)
    ]
    return [
        table_of("kept for backward", operations, [fields(row) for row in select(rows, Kept)]),
        table_of("three sigmoids", sigmoids | columns(note="why not"), [fields(row) for row in select(rows, Sigmoids)]),
        table_of("the lecture's graph", columns("node", "forward", "backward"), nodes),
    ]


EXPERIMENT = Experiment(21, "backprop-memory", LINE, CLAIM, (Kept, Sigmoids, Gradient), measure, judge, draw, tabulate)
