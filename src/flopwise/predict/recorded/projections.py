"""Products of one input with several weights as one: queries, keys and values; a gate and what it gates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from flopwise.errors import Unsupported
from flopwise.predict.op_time import is_cast
from flopwise.records.prediction import PredictedStep
from flopwise.work.operation import COPY, MATMUL, OpWork

_HINT = "measure it: no two products of one input were recorded in this step"
_ADDS = ("add", "add_")


def with_joined_projections(ops: Sequence[OpWork], value: str, step: PredictedStep) -> Sequence[OpWork]:
    """The step with such products joined, forward and backward. Going back, gradients are first put side by side."""
    sources = {op.writes[0][0]: op.reads[0][0] for op in ops if is_cast(op) and op.reads and op.writes}
    groups = [group for group in _groups(ops, sources) if len(group) > 1]
    if not groups:
        raise Unsupported("projections = 'fused' finds nothing to join in this step", _HINT)
    casts, found = _casts(ops), list[OpWork | None](ops)
    for group, ways in zip(groups, _ways_back(ops, groups, sources), strict=True):
        _replace(found, group, [_side_by_side(ops, group)])
        same = [cast for place in group for cast in casts[ops[place].module, _source(ops[place], sources)]]
        _drop(found, same[1:])  # what all of them read is cast once
        if ways["weight"] and ways["input"]:
            joined = _side_by_side(ops, ways["input"], inner=True)
            _replace(found, sorted(ways["weight"]), [_stacked(ops, ways["weight"])])
            _replace(found, sorted(ways["input"]), [_put_together(ops, ways["input"]), joined])
            # One gradient arrives where several were cast and added.
            _drop(found, [*ways["add"][: len(group) - 1], *ways["cast"][: len(group) - 1]])
    return [op for op in found if op is not None]


def _casts(ops: Sequence[OpWork]) -> dict[tuple[str, int], list[int]]:
    """Going forward, by module and what they cast."""
    found = defaultdict[tuple[str, int], list[int]](list)
    for place, op in enumerate(ops):
        if op.phase == "forward" and is_cast(op) and op.reads:
            found[op.module, op.reads[0][0]].append(place)
    return found


def _ways_back(
    ops: Sequence[OpWork], groups: Sequence[list[int]], sources: Mapping[int, int]
) -> list[dict[str, list[int]]]:
    """Of each group, what its modules do going back: see `_way`."""
    by_module = {ops[place].module: n for n, group in enumerate(groups) for place in group}
    found: list[dict[str, list[int]]] = [defaultdict(list) for _ in groups]
    for place, op in enumerate(ops):
        if op.phase == "backward" and op.module in by_module:
            forward = ops[groups[by_module[op.module]][0]]
            found[by_module[op.module]][_way(op, _source(forward, sources), sources)].append(place)
    return found


def _drop(found: list[OpWork | None], places: Sequence[int]) -> None:
    for place in places:
        found[place] = None


def _groups(ops: Sequence[OpWork], sources: Mapping[int, int]) -> list[list[int]]:
    """Forward products by what they read, or what that was cast from, of modules side by side."""
    groups = defaultdict[tuple[object, ...], list[int]](list)
    for place, op in enumerate(ops):
        if op.kind == MATMUL and op.phase == "forward" and len(op.shapes) >= 2 and len(op.shapes[-2]) == 2 and op.reads:
            groups[op.module.rpartition(".")[0], _source(op, sources), op.shapes[-2]].append(place)
    return list(groups.values())


def _source(op: OpWork, sources: Mapping[int, int]) -> int:
    """The tensor of the product's left side (a bias may come first), before it was cast."""
    left = op.reads[-2][0] if len(op.reads) > 1 else op.reads[0][0]
    return sources.get(left, left)


def _way(op: OpWork, source: int, sources: Mapping[int, int]) -> str:
    """What an operation of a projection does going back: gives the weight's gradient or the input's, casts or adds it."""
    if op.kind != MATMUL:
        return "add" if op.op in _ADDS else "cast" if is_cast(op) and op.read_bytes < op.write_bytes else "other"
    return "weight" if any(sources.get(tensor, tensor) == source for tensor, _ in op.reads) else "input"


def _replace(found: list[OpWork | None], places: Sequence[int], made: Sequence[OpWork]) -> None:
    for place in places:
        found[place] = None
    for place, op in zip(places[-len(made) :], made, strict=True):
        found[place] = op


def _side_by_side(ops: Sequence[OpWork], places: Sequence[int], inner: bool = False) -> OpWork:
    """One product for several: as wide as all of them, or (`inner`) as deep."""
    parts = [ops[place] for place in places]
    (rows, depth), (_, width) = parts[0].shapes[-2:]
    if inner:
        depth = sum(part.shapes[-2][1] for part in parts)
    else:
        width = sum(part.shapes[-1][1] for part in parts)
    return _product(parts, (rows, depth), (depth, width))


def _stacked(ops: Sequence[OpWork], places: Sequence[int]) -> OpWork:
    parts = [ops[place] for place in places]
    (_, depth), (_, width) = parts[0].shapes[-2:]
    return _product(parts, (sum(part.shapes[-2][0] for part in parts), depth), (depth, width))


def _product(parts: Sequence[OpWork], left: tuple[int, int], right: tuple[int, int]) -> OpWork:
    reads = {tensor: size for part in parts for tensor, size in part.reads}
    item = 4 if parts[0].dtype in ("fp32", "tf32") else 2
    written = sum(size for part in parts for _, size in part.writes)
    written = min(written, left[0] * right[1] * item)
    return msgspec.structs.replace(
        parts[0],
        flops=sum(part.flops for part in parts),
        reads=tuple(reads.items()),
        writes=tuple(write for part in parts for write in part.writes),
        read_bytes=sum(reads.values()),
        write_bytes=written,
        shapes=(left, right),
    )


def _put_together(ops: Sequence[OpWork], places: Sequence[int]) -> OpWork:
    """The copy of the gradients into one."""
    parts = [ops[place] for place in places]
    moved = sum(part.shapes[-2][0] * part.shapes[-2][1] for part in parts) * (
        2 if parts[0].dtype not in ("fp32", "tf32") else 4
    )
    shapes = tuple(part.shapes[-2] for part in parts)
    none: tuple[tuple[int, int], ...] = ()
    return msgspec.structs.replace(
        parts[0],
        op="cat",
        kind=COPY,
        flops=0,
        read_bytes=moved,
        write_bytes=moved,
        reads=none,
        writes=none,
        shapes=shapes,
        strided=True,
    )
