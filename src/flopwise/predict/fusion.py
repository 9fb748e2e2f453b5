"""What a compiler makes of a step's operations: neighbours become one kernel, and what passes between them stays on chip.

Matmuls and attention stay kernels of their own, and so does all of the optimizer, which is not part of the model's graph.
Of the rest, two operations of a phase become one kernel if one reads what the other wrote, or both read the same tensor,
and if no matmul lies on any path between them: that is what a `level` says, the number of changes between the two kinds on
the longest path to an operation. A fused kernel reads what comes from outside, once, and writes what someone outside reads
later. What only the backward pass reads it does not write, if that can compute it again from less than it would have to read.
A sum over columns, as of a norm's gain, is no part of a loop over rows: it takes as long as a second kernel that reads all
again. A cast or an elementwise operation that only one other reads is part of that one's kernel, even where the other thing
that it reads comes from beyond a matmul; and what several want in the same other dtype is cast once.

Where only parts of the model are compiled (`compile = "blocks"`), the same holds within each part; the rest runs as it is.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import msgspec

from flopwise.predict.constants import LONGEST_ROW, ROW_SHARE
from flopwise.predict.op_time import FUSED_OP, TRITON_KINDS, is_cast
from flopwise.work import operation as kinds
from flopwise.work.operation import ELEMENTWISE, NORMALISATION, PART, REDUCTION, OpWork

NEVER_FUSED = (kinds.MATMUL, kinds.ATTENTION, kinds.OPTIMIZER, kinds.COMMUNICATION)
# The class of a fused kernel: that of the first of these among its parts. A row that is reduced on the way is still read once,
# in order, and so goes like the elementwise work around it.
_KERNEL_CLASS = (
    *(kinds.LOSS, kinds.SOFTMAX, NORMALISATION, ELEMENTWISE, REDUCTION),
    *(kinds.INDEX, kinds.RANDOM, kinds.COPY, kinds.MEMORY, kinds.OTHER),
)
_NUMBERED = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")  # up to the first number: 'blocks.0' of 'blocks.0.mlp.up'

Graph = Callable[[OpWork], str | None]  # the compiled graph that an operation is part of; None: it is in none
Sizes = tuple[tuple[int, int], ...]  # (tensor, bytes)


def whole_model(op: OpWork) -> str | None:
    """All in one graph (a phase each), but what runs outside of the model."""
    return None if op.outside else ""


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


def repeated_blocks(ops: Iterable[OpWork]) -> Graph:
    """A graph for every block of a model that somebody else wrote: the members of its longest list of modules.

    >>> ops = [OpWork(op="mul", module=name, phase="forward", kind=ELEMENTWISE, dtype="fp32")
    ...        for name in ("model.layers.0.mlp", "model.layers.1.mlp", "head.0")]
    >>> [repeated_blocks(ops)(op) for op in ops]
    ['model.layers.0', 'model.layers.1', None]
    """
    lists: dict[str, dict[str, int]] = {}
    for module in dict.fromkeys(op.module for op in ops):
        if block := block_of_module(module):
            members = lists.setdefault(block.rpartition(".")[0], {})
            members[block] = members.get(block, 0) + 1
    longest = max(lists.values(), key=lambda members: (len(members), sum(members.values())), default={})
    return lambda op: block if (block := block_of_module(op.module)) in longest else None


def compiled_ops(ops: Sequence[OpWork], compile_lever: str, blocks: Graph = block_of) -> Sequence[OpWork]:
    """What the GPU runs under a recipe's `compile`; `blocks`: what is compiled apart under 'blocks'."""
    if compile_lever == "off":
        return ops
    return fuse(ops, blocks if compile_lever == "blocks" else whole_model)


def fuse(ops: Sequence[OpWork], graph: Graph = whole_model) -> list[OpWork]:
    """The kernels that a compiled step runs instead of `ops`; the order follows what depends on what."""
    running = _cast_once(ops, graph)
    graphs = [None if _alone(op) else graph(op) for op in running]
    levels = _put_off(running, _levels(running, graphs), graphs)
    group = _groups(running, levels, graphs)
    members, readers, sizes = defaultdict[int, list[int]](list), defaultdict[int, set[int]](set), dict[int, int]()
    for number, op in enumerate(running):
        members[group(number)].append(number)
        sizes.update(op.writes)
        for tensor, _ in op.reads:
            readers[tensor].add(group(number))
    phases = list(dict.fromkeys(op.phase for op in running))
    roots = sorted(members, key=lambda root: (phases.index(running[root].phase), levels[root], root))
    parts = [[running[number] for number in members[root]] for root in roots]
    kernels = []
    for root, some in zip(roots, parts, strict=True):
        kernels.append(running[root] if graphs[root] is None else _joined(root, some, readers, sizes))
    compiled = {place for place, one in enumerate(kernels) if not _alone(one) and graph(one) is not None}
    found = _computed_again(kernels, compiled, parts)
    return [_summed(one) if _sums_columns(one, some) else one for one, some in zip(found, parts, strict=True)]


def _cast_once(ops: Sequence[OpWork], graph: Graph) -> list[OpWork]:
    """The same, but that a whole tensor which several read in another dtype is cast for the first of them alone."""
    ops = [op for op in ops if op.kernels]
    written = Counter(tensor for op in ops for tensor, _ in op.writes)
    sizes = {tensor: size for op in ops for tensor, size in op.writes}
    # tensor -> size, dtype, phase, graph -> what it became
    casts = defaultdict[int, dict[tuple[object, ...], int]](dict)
    same: dict[int, int] = {}
    found = []
    for op in ops:
        reads = tuple((same.get(tensor, tensor), size) for tensor, size in op.reads)
        op = msgspec.structs.replace(op, reads=reads) if reads != op.reads else op
        for tensor, _ in op.writes:  # what was cast is another then
            casts.pop(tensor, None)
        if _casts_whole_tensor(op, sizes, written) and (where := graph(op)) is not None:
            tensor, size = op.writes[0]
            first = casts[op.reads[0][0]].setdefault((size, op.dtype, op.phase, where), tensor)
            if first != tensor:
                same[tensor] = first
                continue
        found.append(op)
    return found


def _casts_whole_tensor(op: OpWork, sizes: Mapping[int, int], written: Mapping[int, int]) -> bool:
    """A cast of all that one other wrote, into a tensor that nothing else writes."""
    if not is_cast(op) or _alone(op) or len(op.reads) != 1 or len(op.writes) != 1:
        return False
    ((tensor, size),) = op.reads
    return sizes.get(tensor) == size and written[op.writes[0][0]] <= 1


def _computed_again(kernels: list[OpWork], compiled: set[int], parts: Sequence[Sequence[OpWork]]) -> list[OpWork]:
    """The same, but that the backward pass makes anew what is cheap to make: a norm's rows in fp32, a gate's sigmoid.

    Sums of rows are kept: they are small, and took a pass over all of it. It begins with what the kernel read or, where that
    is less to read, with what it wrote and went on with.
    """
    readers = defaultdict[int, list[int]](list)
    for place, kernel in enumerate(kernels):
        for tensor, _ in kernel.reads:
            readers[tensor].append(place)
    backward = {place for place in compiled if kernels[place].phase == "backward"}
    found = list(kernels)
    for place in sorted(compiled - backward):
        kernel = kernels[place]
        least = ROW_SHARE * max((size for _, size in kernel.reads), default=0)
        large = [tensor for tensor, size in kernel.writes if size > least]
        wanted = {
            tensor: readers[tensor] for tensor in large if readers[tensor] and backward.issuperset(readers[tensor])
        }
        if wanted:
            _recompute(found, place, wanted, parts[place])
    return found


def _recompute(kernels: list[OpWork], place: int, readers: Mapping[int, list[int]], parts: Sequence[OpWork]) -> None:
    """Do not write what only these read, and let them compute it, where they have less to read then."""
    kernel = kernels[place]
    known, written = dict(kernel.reads) | dict(kernel.writes), dict(kernel.writes)
    ways = [_sources(parts, set(readers), stop) for stop in (set[int](), written.keys() - readers.keys())]
    backward = sorted({reader for some in readers.values() for reader in some})
    more = {reader: _least(ways, known, dict(kernels[reader].reads)) for reader in backward}
    saved = sum(written[tensor] * (1 + len(some)) for tensor, some in readers.items())
    if sum(sum(reads.values()) for reads in more.values()) >= saved:
        return
    kernels[place] = _moving(kernel, kernel.reads, _without(kernel.writes, readers))
    for reader in backward:
        one = kernels[reader]
        kernels[reader] = _moving(one, (*_without(one.reads, readers), *sorted(more[reader].items())), one.writes)


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


def _without(sizes: Sizes, gone: Container[int]) -> Sizes:
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
    return op.kind in NEVER_FUSED or op.phase == "optimizer" or op.op.startswith("flopwise::")


def _same_loop(a: OpWork, b: OpWork) -> bool:
    """Whether one loop over rows serves both: the same number of elements, or one of them a row's sum or gain."""
    small, large = sorted((_elements(a), _elements(b)))
    return large % small == 0 and large // small <= LONGEST_ROW


def _elements(op: OpWork) -> int:
    return max([1, *(math.prod(shape) for shape in op.shapes)])


def _joined(root: int, parts: Sequence[OpWork], readers: Mapping[int, set[int]], sizes: Mapping[int, int]) -> OpWork:
    """One kernel of its parts."""
    if len(parts) == 1 and (parts[0].kind not in TRITON_KINDS or parts[0].op.startswith(PART)):
        return parts[0]
    reads = _read_from_outside(parts, sizes)
    written = {tensor: size for part in parts for tensor, size in part.writes}
    writes = {tensor: size for tensor, size in written.items() if tensor in reads or readers.get(tensor) != {root}}
    first = min(parts, key=lambda part: _KERNEL_CLASS.index(part.kind) if part.kind in _KERNEL_CLASS else 99)
    kernel = OpWork(
        op=FUSED_OP + " ".join(dict.fromkeys(part.op for part in parts)),
        module=first.module,
        phase=first.phase,
        kind=first.kind,
        dtype=first.dtype,
        flops=sum(part.flops for part in parts),
        shapes=(max((shape for part in parts for shape in part.shapes), key=math.prod, default=()),),
    )
    return _moving(kernel, tuple(reads.items()), tuple(writes.items()))


def _read_from_outside(parts: Iterable[OpWork], sizes: Mapping[int, int]) -> dict[int, int]:
    """What is added to in place was read first; of halves that are read one by one, both count."""
    made, reads = set[int](), dict[int, int]()
    for part in parts:
        for tensor, size in part.reads:
            if tensor not in made:
                before = reads.get(tensor, 0)
                reads[tensor] = max(before, size, min(before + size, sizes.get(tensor, 0)))
        made |= {tensor for tensor, _ in part.writes}
    return reads


def _summed(kernel: OpWork) -> OpWork:
    """With what summing columns takes: about as long as a second kernel that reads everything again.

    `read_bytes` stays what it must read.
    """
    return msgspec.structs.replace(kernel, reads=(*kernel.reads, *kernel.reads), kernels=2)


def _sums_columns(kernel: OpWork, parts: Sequence[OpWork]) -> bool:
    """Whether a fused kernel makes one number of every column, as a gain's gradient is made, which nothing but a cast reads."""
    if not kernel.op.startswith(FUSED_OP):
        return False
    read = {tensor for part in parts if not is_cast(part) for tensor, _ in part.reads}
    return any(_may_sum_columns(part) and read.isdisjoint(tensor for tensor, _ in part.writes) for part in parts)


def _may_sum_columns(op: OpWork) -> bool:
    shape = max(op.shapes, key=math.prod, default=())
    if op.kind not in (REDUCTION, NORMALISATION) or len(shape) < 2:
        return False
    return op.write_bytes in (2 * shape[-1], 4 * shape[-1])


class _Union:
    """Disjoint sets of numbers; called with a number, it returns the first of its set."""

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
