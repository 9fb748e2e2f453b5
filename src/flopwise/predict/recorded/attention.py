"""Attention by another kernel: one of SDPA's backends for another, or fused attention for what is written out."""

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from flopwise.errors import Unsupported
from flopwise.predict.dry.architecture import architecture
from flopwise.records.prediction import PredictedStep
from flopwise.work.operation import ATTENTION, ELEMENTWISE, MATMUL, SOFTMAX, OpWork

_BACKENDS = ("flash", "cudnn", "efficient")
_HALF = ("bf16", "fp16")
_FORWARD, _BACKWARD = ("forward", "recompute"), ("backward",)
_HINT = "measure it: nothing of that kind was recorded in this step"


def with_attention(ops: Sequence[OpWork], value: str, step: PredictedStep) -> Sequence[OpWork]:
    """The step with SDPA, or with one of its backends. What is written out becomes SDPA's first."""
    held = value.removeprefix("sdpa").removeprefix("-")
    ops = _fused(ops, held, step)
    if not any(op.kind == ATTENTION for op in ops):
        raise Unsupported(f"attention = '{value}' finds no attention in this step", _HINT)
    return [_by(op, held) for op in ops] if held else ops


def _by(op: OpWork, backend: str) -> OpWork:
    """The same attention by another backend; those that can be asked for have kernels for halves alone."""
    if op.kind != ATTENTION or not op.flops:
        return op
    if op.dtype not in _HALF:
        raise Unsupported(f"{backend} has no attention in {op.dtype}", "try precision = bf16 with it")
    now = next((one for one in _BACKENDS if one in op.op), "")
    return msgspec.structs.replace(op, op=op.op.replace(now, backend)) if now else op


def _fused(ops: Sequence[OpWork], held: str, step: PredictedStep) -> Sequence[OpWork]:
    """Every softmax between two batched products, and all else that touches scores, replaced by one operation.

    Scores are told by their size within their module: as many as the softmax has, in whatever dtype. So masks, scales and
    dropout of scores go with it, in both directions.
    """
    scores = {op.module: math.prod(op.shapes[0]) for op in ops if _is_softmax(op)}
    masked = {op.module for op in ops if op.module in scores and _masks(op, scores[op.module])}
    found = list[OpWork | None](ops)
    for (module, _), places in _groups(ops, scores).items():
        parts = [ops[place] for place in places]
        making = _making(parts, scores[module])
        if making is not None:
            one = _one(parts, making, scores[module], held or _first_choice(parts, step))
            for place in places:
                found[place] = None
            # All that it reads is there by then. Where scores are masked, it is taken to be by their order.
            found[places[-1]] = msgspec.structs.replace(one, whole=module not in masked)
    return [op for op in found if op is not None]


def _groups(ops: Sequence[OpWork], scores: dict[str, int]) -> dict[tuple[str, str], list[int]]:
    """By module and phase, where scores are touched."""
    found = defaultdict[tuple[str, str], list[int]](list)
    for place, op in enumerate(ops):
        if op.module in scores and op.kernels and _touches(op, scores[op.module]):
            found[op.module, op.phase].append(place)
    return found


def _is_softmax(op: OpWork) -> bool:
    return op.kind == SOFTMAX and op.phase in _FORWARD and bool(op.shapes) and len(op.shapes[0]) >= 3


def _touches(op: OpWork, elements: int) -> bool:
    return any(size in (elements, 2 * elements, 4 * elements) for _, size in (*op.reads, *op.writes)) and (
        op.kind != MATMUL or any(math.prod(shape) == elements for shape in op.shapes) or _makes(op, elements)
    )


def _masks(op: OpWork, elements: int) -> bool:
    """Whether an operation puts something smaller onto scores: a mask, for all heads or batches."""
    sizes = [math.prod(shape) for shape in op.shapes]
    return op.kind == ELEMENTWISE and max(sizes, default=0) == elements and any(1 < size < elements for size in sizes)


def _makes(op: OpWork, elements: int) -> bool:
    (a, b) = op.shapes[-2:] if len(op.shapes) >= 2 else ((0,), (0,))
    return math.prod(a[:-1]) * b[-1] == elements


def _making(parts: Sequence[OpWork], elements: int) -> OpWork | None:
    """The product that makes the scores; None where these are not two products and a softmax."""
    products = [op for op in parts if op.kind == MATMUL]
    if len(products) < 2 or not any(op.kind == SOFTMAX for op in parts):
        return None
    return next((op for op in products if _makes(op, elements)), None)


def _one(parts: Sequence[OpWork], making: OpWork, elements: int, backend: str) -> OpWork:
    """Fused attention for a group of operations."""
    backward, columns = parts[0].phase in _BACKWARD, making.shapes[-1][-1]
    batch, rows, width = making.shapes[-2]
    reads, writes = _ends(parts, {elements, 2 * elements, 4 * elements})
    product = 2 * batch * rows * columns * width
    name = f"_scaled_dot_product_{backend}_attention"
    return msgspec.structs.replace(
        parts[0],
        op=f"{name}_backward" if backward else name,
        kind=ATTENTION,
        dtype="fp32" if making.dtype == "tf32" else making.dtype,
        flops=product * (5 if backward else 2),  # going back, scores are computed again
        read_bytes=sum(reads.values()),
        write_bytes=sum(writes.values()),
        kernels=1,
        strided=False,
        mixed=False,
        reads=tuple(reads.items()),
        writes=tuple(writes.items()),
        shapes=((batch, 1, rows, width), (batch, 1, columns, width), (batch, 1, columns, width)),
    )


def _ends(parts: Sequence[OpWork], large: set[int]) -> tuple[dict[int, int], dict[int, int]]:
    """What a group reads from outside, and what its products write, but scores."""
    made = {tensor for op in parts for tensor, _ in op.writes}
    reads = {t: size for op in parts for t, size in op.reads if t not in made and size not in large}
    return reads, {t: size for op in parts if op.kind == MATMUL for t, size in op.writes if size not in large}


def _first_choice(parts: Sequence[OpWork], step: PredictedStep) -> str:
    """What SDPA takes for such tensors by itself."""
    product = next((op for op in parts if op.kind == MATMUL), parts[0])
    width = min(product.shapes[-2][-1] if product.shapes else 0, 256)
    order = architecture(step.architecture).attention if step.architecture else ()
    able = {"efficient"} | ({"flash"} if product.dtype in _HALF else set())
    able |= {"cudnn"} if product.dtype in _HALF and width <= 128 and width % 8 == 0 else set()
    return next((backend for backend in order if backend in able), "efficient")
