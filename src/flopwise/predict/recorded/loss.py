"""The head's matmul and the cross entropy as one: what the shape simulator makes of the same rows and the same weight."""

from collections.abc import Iterable, Sequence

import msgspec

from flopwise.errors import Unsupported
from flopwise.predict.op_time import is_cast
from flopwise.predict.shapes.losses import loss_fused
from flopwise.predict.shapes.tape import Parameter, Tape, Tensor
from flopwise.records.prediction import PredictedStep
from flopwise.work.operation import LOSS, MATMUL, OPTIMIZER, OpWork

_HINT = "measure it: no head followed by a cross entropy was recorded in this step"
_SAME = 0.5  # of the logits' elements: what has fewer is not made of them row by row


def with_fused_loss(ops: Sequence[OpWork], value: str, step: PredictedStep) -> Sequence[OpWork]:
    """The step whose logits never exist whole: all that touches them goes, and the fused loss comes in its place."""
    place = _head(ops)
    logits = _logits(ops, place)
    gone = {n for n, op in enumerate(ops) if op.phase != OPTIMIZER and _touches(op, logits)}
    gone |= _casts_for(ops, gone)
    forward, backward = _made(ops, place, step)
    first = min((n for n in gone if ops[n].phase == "backward"), default=-1)
    found: list[OpWork] = []
    for n, op in enumerate(ops):
        found += forward if n == place else backward if n == first else [] if n in gone else [op]
    return found


def _head(ops: Sequence[OpWork]) -> int:
    """The place of the product whose columns the loss is over."""
    losses = [op for op in ops if op.kind == LOSS and op.phase != "backward" and op.shapes and len(op.shapes[0]) == 2]
    if losses:
        vocab = losses[0].shapes[0][1]
        for place in reversed(range(len(ops))):
            op = ops[place]
            if (
                op.kind == MATMUL
                and op.phase in ("forward", "loss")
                and len(op.shapes) >= 2
                and op.shapes[-1][-1] == vocab
            ):
                return place
    raise Unsupported("loss = 'fused' finds no head and cross entropy in this step", _HINT)


def _logits(ops: Sequence[OpWork], head: int) -> set[int]:
    """The head's results, whatever is made of them number by number, and their gradients."""
    (rows, _), (_, vocab) = ops[head].shapes[-2:]
    least = _SAME * rows * vocab * 2
    found = {tensor for tensor, _ in ops[head].writes}
    for op in ops[head + 1 :]:
        starts = op.kind == LOSS and op.phase == "backward"
        if op.kind != MATMUL and op.phase != OPTIMIZER and (starts or not found.isdisjoint(t for t, _ in op.reads)):
            found |= {tensor for tensor, size in op.writes if size >= least}
    return found


def _touches(op: OpWork, tensors: set[int]) -> bool:
    return any(tensor in tensors for tensor, _ in (*op.reads, *op.writes))


def _casts_for(ops: Sequence[OpWork], gone: Iterable[int]) -> set[int]:
    """Casts that only these operations read, and those of what only these wrote: the fused loss has its own."""
    leaving = set(gone)
    read_by, written_by = dict[int, set[int]](), dict[int, set[int]]()
    for n, op in enumerate(ops):
        for tensor, _ in op.reads:
            read_by.setdefault(tensor, set()).add(n)
        for tensor, _ in op.writes:
            written_by.setdefault(tensor, set()).add(n)
    casts = set()
    for n, op in enumerate(ops):
        if is_cast(op) and n not in leaving:
            before = read_by.get(op.writes[0][0], {-1}) if op.writes else {-1}
            after = written_by.get(op.reads[0][0], {-1}) if op.reads else {-1}
            if (op.phase == "backward" and after <= leaving) or (op.phase != "backward" and before <= leaving):
                casts.add(n)
    return casts


def _made(ops: Sequence[OpWork], place: int, step: PredictedStep) -> tuple[list[OpWork], list[OpWork]]:
    """The fused loss, forward and backward, with numbers for its tensors that no other has."""
    head, t = ops[place], Tape()
    (rows, width), (_, vocab) = head.shapes[-2:]
    compute = "fp32" if head.dtype == "tf32" else head.dtype
    wide, kept = _dtypes(ops, place, step, compute)
    t.autocast, t.phase, t.module = compute if {wide, kept} != {compute} else "", LOSS, head.module
    hidden, table = (_leaf(t, shape, dtype) for shape, dtype in (((rows, width), wide), ((vocab, width), kept)))
    loss = loss_fused(t, hidden, table, t.tensor((rows,), "int64"), head.dtype == "tf32")
    split, t.phase = len(t.ops), "backward"
    t.backward(loss, t.run("ones_like", (), (), "fp32"))
    above = 1 + max((tensor for op in ops for tensor, _ in (*op.reads, *op.writes)), default=0)
    made = [_renumbered(op, above) for op in t.ops]
    return made[:split], made[split:]


def _dtypes(ops: Sequence[OpWork], place: int, step: PredictedStep, compute: str) -> tuple[str, str]:
    """Of the head's rows and of its weight, before they were cast to what it computes in."""
    weights = {weight.tensor: weight.dtype for weight in step.weights}
    sources = [_source(ops, place, tensor) for tensor, _ in ops[place].reads]
    rows, width = ops[place].shapes[-2]
    hidden = next((size for one, size in _sizes(ops, sources, place) if one not in weights), 0)
    kept = next((weights[one] for one in sources if one in weights), compute)
    return "fp32" if hidden >= 4 * rows * width else compute, kept


def _source(ops: Sequence[OpWork], place: int, tensor: int) -> int:
    """What a tensor was cast from; itself where it was not."""
    for op in reversed(ops[:place]):
        if any(one == tensor for one, _ in op.writes):
            return op.reads[0][0] if is_cast(op) and op.reads else tensor
    return tensor


def _sizes(ops: Sequence[OpWork], tensors: Sequence[int], place: int) -> list[tuple[int, int]]:
    sizes = {tensor: size for op in ops[: place + 1] for tensor, size in (*op.reads, *op.writes)}
    return [(tensor, sizes.get(tensor, 0)) for tensor in tensors]


def _leaf(t: Tape, shape: tuple[int, ...], dtype: str) -> Tensor:
    tensor = t.tensor(shape, dtype)
    tensor.node = Parameter("", tensor)
    return tensor


def _renumbered(op: OpWork, above: int) -> OpWork:
    reads, writes = (tuple((tensor + above, size) for tensor, size in some) for some in (op.reads, op.writes))
    return msgspec.structs.replace(op, reads=reads, writes=writes)
