"""Norms, activations and rotations that are written out, each as one kernel forward and one backward.

A piece is what a few elementwise operations of one module compute. As one kernel it reads what comes from outside and writes
what is read outside; going back it computes again what the pieces had kept, from what the forward kernel read.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from flopwise.errors import Unsupported
from flopwise.records.prediction import PredictedStep
from flopwise.work.operation import COPY, ELEMENTWISE, NORMALISATION, OPTIMIZER, REDUCTION, OpWork

_NORM = re.compile(r"(?i)norm|(^|_)ln(_|\d|$)")
_ACTIVATIONS = ("silu", "gelu", "relu", "tanh", "sigmoid", "erf", "mish", "softplus", "hardswish", "leaky_relu")
_ADDS = ("add", "add_")
_TURNS = ("neg", "mul", *_ADDS, "cat", "slice_backward", "copy_", "zeros", "zero_")
_SMALL = 1 / 16  # of what a piece reads: a number for each row, which is kept
_HINT = "measure it: nothing of that kind was recorded in this step, or it is one kernel already"

Places = list[int]


def with_norm(ops: Sequence[OpWork], value: str, step: PredictedStep) -> Sequence[OpWork]:
    """The step with every written-out norm as one kernel: PyTorch's or our own."""
    pieces = defaultdict[str, Places](list)
    for place, op in enumerate(ops):
        if op.kind in (ELEMENTWISE, REDUCTION, COPY) and op.kernels and _NORM.search(op.module.rpartition(".")[2]):
            pieces[op.module].append(place)
    name = "rms_norm" if value == "torch" else "flopwise::rms_norm"
    return _joined(ops, _by_phase(ops, pieces.values()), name, NORMALISATION, "norm", sums=1)


def with_activation(ops: Sequence[OpWork], value: str, step: PredictedStep) -> Sequence[OpWork]:
    """The step with every activation, and the product with its gate, as one kernel."""
    pieces, by_module = [], _by_module(ops)
    for place, op in enumerate(ops):
        if op.op in _ACTIVATIONS and op.phase == "forward" and not _NORM.search(op.module.rpartition(".")[2]):
            size = _elements(op)
            near = [*by_module[op.module], *by_module.get(op.module.rpartition(".")[0], ())]
            pieces.append(_around(ops, {place}, [one for one in near if _elements(ops[one]) == size]))
    return _joined(ops, _by_phase(ops, pieces), "flopwise::swiglu", ELEMENTWISE, "activation")


def with_rope(ops: Sequence[OpWork], value: str, step: PredictedStep) -> Sequence[OpWork]:
    """The step with queries and keys turned in one kernel, where that is written as halves that are swapped and negated."""
    pieces, by_module = [], _by_module(ops)
    for module, places in _turned(ops).items():
        whole = [sum(math.prod(shape) for shape in ops[place].shapes) for place in places]
        sizes = {size for each in whole for size in (each, each // 2)}
        near = [one for one in by_module[module] if ops[one].op in _TURNS and _elements(ops[one]) in sizes]
        pieces.append(_around(ops, places, near))
    return _joined(ops, _by_phase(ops, pieces), "flopwise::rope_pair", ELEMENTWISE, "rope")


def _turned(ops: Sequence[OpWork]) -> dict[str, set[int]]:
    """By module, where halves are put together of which one was negated."""
    negated = {tensor for op in ops if op.op == "neg" for tensor, _ in op.writes}
    found = defaultdict[str, set[int]](set)
    for place, op in enumerate(ops):
        if op.op == "cat" and op.phase == "forward" and any(tensor in negated for tensor, _ in op.reads):
            found[op.module].add(place)
    return found


def _by_module(ops: Sequence[OpWork]) -> dict[str, Places]:
    """The places of what may be part of a piece."""
    found = defaultdict[str, Places](list)
    for place, op in enumerate(ops):
        if op.kernels and op.kind in (ELEMENTWISE, COPY):
            found[op.module].append(place)
    return found


def _around(ops: Sequence[OpWork], seeds: set[int], near: Sequence[int]) -> Places:
    """Of what is near, all that the seeds are connected to going forward, and everything going back."""
    forward, grown = set(seeds), True
    while grown:
        made, read = (
            {tensor for place in forward for tensor, _ in getattr(ops[place], way)} for way in ("writes", "reads")
        )
        more = {
            place
            for place in near
            if ops[place].phase == "forward"
            and (
                made & {tensor for tensor, _ in ops[place].reads} or read & {tensor for tensor, _ in ops[place].writes}
            )
        }
        grown = not more <= forward
        forward |= more
    return sorted(forward | {place for place in near if ops[place].phase == "backward"})


def _by_phase(ops: Sequence[OpWork], pieces: Iterable[Places]) -> list[tuple[Places, Places]]:
    """Forward and backward of each piece that is more than one kernel."""
    found = []
    for places in pieces:
        forward, backward = ([p for p in places if ops[p].phase == phase] for phase in ("forward", "backward"))
        if sum(ops[p].kernels for p in forward) > 1:
            found.append((forward, backward))
    return found


def _joined(
    ops: Sequence[OpWork], pieces: Sequence[tuple[Places, Places]], name: str, kind: str, lever: str, sums: int = 0
) -> Sequence[OpWork]:
    if not pieces:
        raise Unsupported(f"{lever}: this step has none that is written out", _HINT)
    found, readers = list[OpWork | None](ops), _readers(ops)
    for forward, backward in pieces:
        one = _kernel(ops, forward, {*forward, *backward}, readers, name, kind)
        made = {tensor for place in forward for tensor, _ in ops[place].writes}
        _put(found, forward, [one])
        if backward:
            found_back = _way_back(ops, backward, made, one, readers, f"{name}_backward", kind, sums)
            _put(found, backward, found_back)
    return [op for op in found if op is not None]


def _put(found: list[OpWork | None], places: Places, made: Sequence[OpWork]) -> None:
    for place in places:
        found[place] = None
    for place, op in zip(places[-len(made) :], made, strict=True):
        found[place] = op


def _kernel(
    ops: Sequence[OpWork], places: Places, piece: set[int], readers: dict[int, set[int]], name: str, kind: str
) -> OpWork:
    parts, made, reads = [ops[place] for place in places], set[int](), dict[int, int]()
    for part in parts:
        for tensor, size in part.reads:
            if tensor not in made:
                reads[tensor] = max(size, reads.get(tensor, 0))
        made |= {tensor for tensor, _ in part.writes}
    written = {tensor: size for part in parts for tensor, size in part.writes}
    writes = {tensor: size for tensor, size in written.items() if not readers.get(tensor, set()) <= piece}
    return _one(parts, name, kind, reads, writes or dict(list(written.items())[-1:]))


def _way_back(
    ops: Sequence[OpWork],
    places: Places,
    kept: set[int],
    forward: OpWork,
    readers: dict[int, set[int]],
    name: str,
    kind: str,
    sums: int,
) -> list[OpWork]:
    """The backward kernel, and after it the sum with a gradient that came another way, where there is one."""
    parts, sums_at = [ops[place] for place in places], _sums_with_others(ops, places, kept)
    own = [op for op in parts if op not in sums_at]
    made = {tensor for op in own for tensor, _ in op.writes}
    summed = {tensor for op in sums_at for tensor, _ in op.writes}
    reads = {t: s for t, s in _reads_back(own, made, kept, forward).items() if t not in summed}
    writes = _read_later(own, set(places), readers)
    if sums_at:  # of several sums with what the parts had made, one is left
        writes |= {t: s for t, s in sums_at[-1].reads if t in made}
    one = msgspec.structs.replace(_one(parts, name, kind, reads, writes), kernels=1 + sums)
    return [one, *sums_at[-1:]] if len(places) > 1 else [one]


def _reads_back(own: Sequence[OpWork], made: set[int], kept: set[int], forward: OpWork) -> dict[int, int]:
    """What the forward kernel read, and what comes from outside; of what its parts had kept, only what is small."""
    most = max((size for _, size in forward.reads), default=0)
    found = dict(forward.reads)
    for op in own:
        found |= {t: s for t, s in op.reads if t not in made and (t not in kept or s <= _SMALL * most)}
    return found


def _read_later(own: Sequence[OpWork], mine: set[int], readers: dict[int, set[int]]) -> dict[int, int]:
    """What someone else reads, or nobody here: gradients of weights."""
    return {t: s for op in own for t, s in op.writes if not readers.get(t) or not readers[t] <= mine}


def _sums_with_others(ops: Sequence[OpWork], places: Places, kept: set[int]) -> list[OpWork]:
    """The sums of what the pieces have made with gradients that come from elsewhere."""
    found, made = [], set[int]()
    for place in places:
        op, read = ops[place], {tensor for tensor, _ in ops[place].reads}
        if op.op in _ADDS and read & made and read - made - kept:
            found.append(op)
        else:
            made |= {tensor for tensor, _ in op.writes}
    return found


def _one(parts: Sequence[OpWork], name: str, kind: str, reads: dict[int, int], writes: dict[int, int]) -> OpWork:
    largest = max((shape for part in parts for shape in part.shapes), key=math.prod, default=())
    return msgspec.structs.replace(
        parts[0],
        op=name,
        kind=kind,
        flops=sum(part.flops for part in parts),
        kernels=1,
        strided=False,
        mixed=False,
        reads=tuple(reads.items()),
        writes=tuple(writes.items()),
        read_bytes=sum(reads.values()),
        write_bytes=sum(writes.values()),
        shapes=(largest,),
    )


def _readers(ops: Sequence[OpWork]) -> dict[int, set[int]]:
    found = defaultdict[int, set[int]](set)
    for place, op in enumerate(ops):
        if op.phase != OPTIMIZER:
            for tensor, _ in op.reads:
                found[tensor].add(place)
    return found


def _elements(op: OpWork) -> int:
    return max((math.prod(shape) for shape in op.shapes), default=0)
