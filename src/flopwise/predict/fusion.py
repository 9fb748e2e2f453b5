"""What a compiler makes of a step's operations: neighbours become one kernel, and what passes between them stays on chip.

Matmuls and attention stay kernels of their own, and so does all of the optimizer, which is not part of the model's graph.
Of the rest, two operations of a phase become one kernel if one reads what the other wrote, or both read the same tensor,
and if no matmul lies on any path between them: that is what `level` tells, the number of changes between the two kinds on
the longest path to an operation. A fused kernel reads what comes from outside, once, and writes what someone outside reads
later. What only the way back reads it does not write, if that can compute it again from less than it would have to read.
A sum over columns, as of a norm's gain, is no part of a loop over rows: it takes as long as a second kernel that reads all
again. A cast or an elementwise operation that only one other reads is part of that one's kernel, even where the other thing
that it reads comes from beyond a matmul; and what several want in the same other dtype is cast once.

Where only parts of the model are compiled (`compile = "blocks"`), the same holds within each part; the rest runs as it is.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec

from flopwise.predict.launching import is_cast
from flopwise.predict.roofline import FUSED_OP, TRITONS
from flopwise.work.operation import (
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
    running = _cast_once([op for op in ops if op.kernels], graph)
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
    sizes = {tensor: size for op in running for tensor, size in op.writes}
    phases = {phase: place for place, phase in enumerate(dict.fromkeys(op.phase for op in running))}
    ordered = sorted(members.items(), key=lambda item: (phases[running[item[1][0]].phase], levels[item[0]], item[1][0]))
    parts = [[running[n] for n in numbers] for _, numbers in ordered]
    kernels = [
        _joined(root, some, readers, sizes) if graphs[root] is not None else running[root]
        for (root, _), some in zip(ordered, parts, strict=True)
    ]
    compiled = [not _alone(one) and graph(one) is not None for one in kernels]
    found = _computed_again(kernels, compiled, parts)
    return [
        _summed(one) if one.op.startswith(FUSED_OP) and _sums_columns(some) else one
        for one, some in zip(found, parts, strict=True)
    ]


def _cast_once(ops: Sequence[OpWork], graph: Graph) -> list[OpWork]:
    """The same, but that a whole tensor which several read in another dtype is cast for the first of them alone."""
    written = Counter(tensor for op in ops for tensor, _ in op.writes)
    sizes = {tensor: size for op in ops for tensor, size in op.writes}
    casts: dict[int, dict[tuple[int, str, str, str], int]] = {}  # tensor -> size, dtype, phase, graph -> what it became
    same: dict[int, int] = {}
    found = []
    for op in ops:
        reads = tuple((same.get(tensor, tensor), size) for tensor, size in op.reads)
        op = msgspec.structs.replace(op, reads=reads) if reads != op.reads else op
        for tensor, _ in op.writes:  # what was cast is another then
            casts.pop(tensor, None)
        where = graph(op) if is_cast(op) and not _alone(op) and len(reads) == len(op.writes) == 1 else None
        found.append(op)
        if where is None or sizes.get(reads[0][0]) != reads[0][1] or written[op.writes[0][0]] > 1:
            continue
        tensor, size = op.writes[0]
        first = casts.setdefault(reads[0][0], {}).setdefault((size, op.dtype, op.phase, where), tensor)
        if first != tensor:
            same[tensor] = first
            found.pop()
    return found


def _computed_again(kernels: list[OpWork], compiled: Sequence[bool], parts: Sequence[Sequence[OpWork]]) -> list[OpWork]:
    """The same, but that the way back makes anew what is cheap to make: a norm's rows in fp32, a gate's sigmoid.

    Sums of rows are kept: they are small, and took a pass over all of it. It begins with what the kernel read or, where that
    is less to read, with what it wrote and went on with.
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
        known = dict(kernel.reads) | dict(kernel.writes)
        kept = {tensor for tensor, _ in kernel.writes if tensor not in gone}
        ways = [_sources(parts[place], set(gone), stop) for stop in (set[int](), kept)]
        more = {reader: _least(ways, known, dict(found[reader].reads)) for reader in backward}
        saved = sum(gone.values()) + sum(size * len(readers[tensor]) for tensor, size in gone.items())
        if gone and sum(sum(reads.values()) for reads in more.values()) < saved:
            found[place] = _moving(found[place], found[place].reads, _without(found[place].writes, gone))
            for reader in backward:
                one = found[reader]
                found[reader] = _moving(one, (*_without(one.reads, gone), *sorted(more[reader].items())), one.writes)
    return found


Sizes = tuple[tuple[int, int], ...]


def _sources(parts: Sequence[OpWork], wanted: set[int], stop: set[int]) -> set[int]:
    """The tensors that some of what a kernel's parts make is made from: what comes from outside, or is in `stop`."""
    needed = set(wanted)
    for part in reversed(parts):
        made = {tensor for tensor, _ in part.writes} & needed - stop
        if made:
            needed = needed - made | {tensor for tensor, _ in part.reads}
    return needed


def _least(ways: Sequence[set[int]], sizes: Mapping[int, int], known: Container[int]) -> dict[int, int]:
    """What has to be read besides what is known, the way on which that is least."""
    more = [{tensor: sizes.get(tensor, 0) for tensor in way if tensor not in known} for way in ways]
    return min(more, key=lambda way: sum(way.values()))


def _summed(kernel: OpWork) -> OpWork:
    """With what summing columns takes: about as long as a second kernel that reads everything again.

    `read_bytes` stays what it must read.
    """
    return msgspec.structs.replace(kernel, reads=(*kernel.reads, *kernel.reads), kernels=2)


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
    """The levels, but that what is cheap and only one operation reads is made there, whatever lies in between."""
    found, readers = list(levels), dict[int, set[int]]()
    for number in reversed(range(len(ops))):
        op = ops[number]
        later = {reader for tensor, _ in op.writes for reader in readers.get(tensor, ())}
        if (is_cast(op) or op.kind == ELEMENTWISE) and graphs[number] is not None and len(later) == 1:
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


def _joined(root: int, parts: Sequence[OpWork], readers: dict[int, set[int]], sizes: dict[int, int]) -> OpWork:
    if len(parts) == 1 and (parts[0].kind not in TRITONS or parts[0].op.startswith(PART)):
        return parts[0]
    made, reads = set[int](), dict[int, int]()
    for part in parts:  # what is added to in place was read first; of halves that are read one by one, both count
        for tensor, size in part.reads:
            if tensor not in made:
                before = reads.get(tensor, 0)
                reads[tensor] = max(before, size, min(before + size, sizes.get(tensor, 0)))
        made |= {tensor for tensor, _ in part.writes}
    kept = {tensor for tensor in made if tensor in reads or readers.get(tensor, set()) != {root}}
    writes = {tensor: size for part in parts for tensor, size in part.writes if tensor in kept}
    telling = min(parts, key=lambda part: _TELLING.index(part.kind) if part.kind in _TELLING else len(_TELLING))
    return OpWork(
        op=FUSED_OP + " ".join(dict.fromkeys(part.op for part in parts)),
        module=telling.module,
        phase=telling.phase,
        kind=telling.kind,
        dtype=telling.dtype,
        flops=sum(part.flops for part in parts),
        read_bytes=sum(reads.values()),
        write_bytes=sum(writes.values()),
        kernels=1,
        reads=tuple(reads.items()),
        writes=tuple(writes.items()),
        shapes=(max((shape for part in parts for shape in part.shapes), key=math.prod, default=()),),
    )


def _sums_columns(parts: Sequence[OpWork]) -> bool:
    """Whether a kernel makes one number of every column, as a gain's gradient is made: nothing in it but a cast reads them."""
    read = {tensor for part in parts if not is_cast(part) for tensor, _ in part.reads}
    return any(_may_sum_columns(part) and read.isdisjoint(tensor for tensor, _ in part.writes) for part in parts)


def _may_sum_columns(op: OpWork) -> bool:
    shape = max(op.shapes, key=math.prod, default=())
    if op.kind not in (REDUCTION, NORMALISATION) or len(shape) < 2:
        return False
    return op.write_bytes in (2 * shape[-1], 4 * shape[-1])


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
