"""What a compiler makes of a step's operations: neighbours become one kernel, and what passes between them stays on chip.

Matmuls and attention stay kernels of their own, and so does all of the optimizer, which is not part of the model's graph.
Of the rest, two operations of a phase become one kernel if one reads what the other wrote, or both read the same tensor,
and if no matmul lies on any path between them: that is what `level` tells, the number of changes between the two kinds on
the longest path to an operation. A fused kernel reads what comes from outside, once, and writes what someone outside reads
later. What only the way back reads it does not write, if that can compute it again from less than it would have to read.
A sum over columns, as of a norm's gain, is no part of a loop over rows: it takes a second kernel, which reads again. A cast
that one operation reads is part of its kernel, even where the other thing that it reads comes from beyond a matmul.

Where only parts of the model are compiled (`compile = "blocks"`), the same holds within each part; the rest runs as it is.
"""

import math
import re
from collections.abc import Callable, Sequence

import msgspec

from flopwise.cost.roofline import FUSED_OP, TRITONS, is_cast
from flopwise.work import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    ELEMENTWISE,
    INDEX,
    LOSS,
    MATMUL,
    MEMORY,
    NORMALISATION,
    OPTIMIZER,
    OTHER,
    PART,
    RANDOM,
    REDUCTION,
    SOFTMAX,
    OpWork,
)

ALONE = (MATMUL, ATTENTION, OPTIMIZER, COMMUNICATION)
# The class of a fused kernel: that of its most telling part. A row that is reduced on the way is still read once, in order,
# and so goes like the elementwise work around it.
_TELLING = (LOSS, SOFTMAX, NORMALISATION, ELEMENTWISE, REDUCTION, INDEX, RANDOM, COPY, MEMORY, OTHER)
_LONGEST_ROW = 2**17
_SUMMED = 2  # tensors, of which a sum over columns is made: what was normed, and the gradient
_ROW_SHARE = 1 / 16  # of what a kernel reads: what is less is a number for each row
_NUMBERED = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")  # up to the first number: 'blocks.0' of 'blocks.0.mlp.up'

Graph = Callable[[OpWork], str | None]  # the compiled graph that an operation is part of; None: it is in none


def whole_model(op: OpWork) -> str | None:
    """All in one graph (a phase each)."""
    return ""


def block_of(op: OpWork) -> str | None:
    """A graph for every block, and one for the loss; embedding, last norm and head are not compiled.

    >>> block_of(OpWork(op="mul", module="blocks.3.mlp", phase="forward", kind=ELEMENTWISE, dtype="fp32"))
    'blocks.3'
    """
    if block := block_of_module(op.module):
        return block
    return "loss" if op.phase == "loss" or op.module == "loss" else None


def block_of_module(module: str) -> str:
    """The block that a module is part of, or ''.

    >>> block_of_module("blocks.3.mlp.up"), block_of_module("head")
    ('blocks.3', '')
    """
    block = _NUMBERED.match(module)
    return block.group() if block else ""


def graph_of(compile_lever: str) -> Graph:
    """The graphs that a recipe's `compile` makes."""
    return block_of if compile_lever == "blocks" else whole_model


def fuse(ops: Sequence[OpWork], graph: Graph = whole_model) -> list[OpWork]:
    """The kernels that a compiled step runs instead of `ops`; the order follows what depends on what."""
    running = [op for op in ops if op.kernels]
    graphs = [None if _alone(op) else graph(op) for op in running]
    levels = _put_off(running, _levels(running, graphs), graphs)
    group = _groups(running, levels, graphs)
    members: dict[int, list[int]] = {}
    for number in range(len(running)):
        members.setdefault(group(number), []).append(number)
    readers: dict[int, set[int]] = {}
    for number, op in enumerate(running):
        for tensor, _ in op.reads:
            readers.setdefault(tensor, set()).add(group(number))
    phases = {phase: place for place, phase in enumerate(dict.fromkeys(op.phase for op in running))}
    ordered = sorted(members.items(), key=lambda item: (phases[running[item[1][0]].phase], levels[item[0]], item[1][0]))
    kernels = [
        _joined(root, [running[n] for n in numbers], readers) if graphs[root] is not None else running[root]
        for root, numbers in ordered
    ]
    return _computed_again(kernels, [not _alone(one) and graph(one) is not None for one in kernels])


def _computed_again(kernels: list[OpWork], compiled: Sequence[bool]) -> list[OpWork]:
    """The same, but that the way back makes anew what is cheap to make: a norm's rows in fp32, a gate's sigmoid.

    Sums of rows are kept: they are small, and took a pass over all of it.
    """
    readers: dict[int, list[int]] = {}
    for place, kernel in enumerate(kernels):
        for tensor, _ in kernel.reads:
            readers.setdefault(tensor, []).append(place)
    found = list(kernels)
    for place, kernel in enumerate(kernels):
        if not compiled[place] or kernel.phase == "backward":
            continue
        least = _ROW_SHARE * max((size for _, size in kernel.reads), default=0)
        gone = {
            tensor: size
            for tensor, size in kernel.writes
            if size > least
            and readers.get(tensor)
            and all(compiled[reader] and kernels[reader].phase == "backward" for reader in readers[tensor])
        }
        backward = sorted({reader for tensor in gone for reader in readers[tensor]})
        more = {reader: dict(kernel.reads).items() - dict(found[reader].reads).items() for reader in backward}
        saved = sum(gone.values()) + sum(size * len(readers[tensor]) for tensor, size in gone.items())
        if gone and sum(size for reads in more.values() for _, size in reads) < saved:
            found[place] = _moving(found[place], found[place].reads, _without(found[place].writes, gone))
            for reader in backward:
                one = found[reader]
                found[reader] = _moving(one, (*_without(one.reads, gone), *sorted(more[reader])), one.writes)
    return found


Sizes = tuple[tuple[int, int], ...]


def _without(sizes: Sizes, gone: dict[int, int]) -> Sizes:
    return tuple((tensor, size) for tensor, size in sizes if tensor not in gone)


def _moving(kernel: OpWork, reads: Sizes, writes: Sizes) -> OpWork:
    read, written = (sum(size for _, size in sizes) for sizes in (reads, writes))
    return msgspec.structs.replace(kernel, reads=reads, writes=writes, read_bytes=read, write_bytes=written)


def _levels(ops: Sequence[OpWork], graphs: Sequence[str | None]) -> list[int]:
    wrote: dict[int, int] = {}
    levels: list[int] = []
    for number, op in enumerate(ops):
        sources = [wrote[tensor] for tensor, _ in op.reads if tensor in wrote and ops[wrote[tensor]].phase == op.phase]
        level = max((levels[s] + (graphs[s] is None or graphs[s] != graphs[number]) for s in sources), default=0)
        levels.append(level)
        wrote |= {tensor: number for tensor, _ in op.writes}
    return levels


def _put_off(ops: Sequence[OpWork], levels: list[int], graphs: Sequence[str | None]) -> list[int]:
    """The levels, but that a cast that only one operation reads is made there, whatever lies in between."""
    found, readers = list(levels), dict[int, set[int]]()
    for number in reversed(range(len(ops))):
        op = ops[number]
        later = {reader for tensor, _ in op.writes for reader in readers.get(tensor, ())}
        if is_cast(op) and graphs[number] is not None and len(later) == 1:
            reader = later.pop()
            if graphs[reader] == graphs[number] and ops[reader].phase == op.phase:
                found[number] = max(found[number], found[reader])
        for tensor, _ in op.writes:
            readers[tensor] = set()
        for tensor, _ in op.reads:
            readers.setdefault(tensor, set()).add(number)
    return found


def _groups(ops: Sequence[OpWork], levels: Sequence[int], graphs: Sequence[str | None]) -> "_Union":
    union = _Union(len(ops))
    last: dict[int, list[int]] = {}  # tensor -> those that wrote or read it since it was last written
    for number, op in enumerate(ops):
        if graphs[number] is not None:
            for tensor, _ in op.reads:
                for other in last.get(tensor, ()):
                    same = levels[other] == levels[number] and ops[other].phase == op.phase
                    if same and graphs[other] == graphs[number] and _same_loop(ops[other], op):
                        union.join(other, number)
        for tensor, _ in op.reads:
            last.setdefault(tensor, []).append(number)
        for tensor, _ in op.writes:
            last[tensor] = [number]
    return union


def _alone(op: OpWork) -> bool:
    """A library's kernel, or our own; and the optimizer's, which is not compiled with the model."""
    return op.kind in ALONE or op.phase == "optimizer" or op.op.startswith("flopwise::")


def _same_loop(a: OpWork, b: OpWork) -> bool:
    """Whether one loop over rows serves both: the same number of elements, or one of them a row's sum or gain."""
    small, large = sorted((_elements(a), _elements(b)))
    return large % small == 0 and large // small <= _LONGEST_ROW


def _elements(op: OpWork) -> int:
    return max([1, *(math.prod(shape) for shape in op.shapes)])


def _joined(root: int, parts: Sequence[OpWork], readers: dict[int, set[int]]) -> OpWork:
    if len(parts) == 1 and (parts[0].kind not in TRITONS or parts[0].op.startswith(PART)):
        return parts[0]
    made = {tensor for part in parts for tensor, _ in part.writes}
    reads = {tensor: size for part in parts for tensor, size in part.reads if tensor not in made}
    kept = {tensor for tensor in made if readers.get(tensor, set()) != {root}}
    writes = {tensor: size for part in parts for tensor, size in part.writes if tensor in kept}
    again = sorted(reads.items(), key=lambda read: read[1])[-_SUMMED:] if any(map(_sums_columns, parts)) else []
    telling = min(parts, key=lambda part: _TELLING.index(part.kind) if part.kind in _TELLING else len(_TELLING))
    return OpWork(
        op=FUSED_OP + " ".join(dict.fromkeys(part.op for part in parts)),
        module=telling.module,
        phase=telling.phase,
        kind=telling.kind,
        dtype=telling.dtype,
        flops=sum(part.flops for part in parts),
        read_bytes=sum(reads.values()) + sum(size for _, size in again),
        write_bytes=sum(writes.values()),
        kernels=2 if again else 1,
        reads=(*reads.items(), *again),
        writes=tuple(writes.items()),
        shapes=(max((shape for part in parts for shape in part.shapes), key=math.prod, default=()),),
    )


def _sums_columns(op: OpWork) -> bool:
    """Whether it makes one number of every column, as a gain's gradient is made."""
    shape = max(op.shapes, key=math.prod, default=())
    if op.kind not in (REDUCTION, NORMALISATION) or len(shape) < 2:
        return False
    rows = math.prod(shape[:-1])
    return op.write_bytes in (2 * shape[-1], 4 * shape[-1]) and op.write_bytes != 4 * rows


class _Union:
    """Disjoint sets of numbers; called with a number, it tells the first of its set."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def __call__(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def join(self, a: int, b: int) -> None:
        low, high = sorted((self(a), self(b)))
        self.parent[high] = low
