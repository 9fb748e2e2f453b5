"""Tensors kept for backward, block by block, and the well-known ones by name."""

import math
import re
from collections.abc import Iterable, Sequence

from flopwise.snapshot.answers import NamedTensor, SavedBlock, SavedTensor
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.model import ModelSpec
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import Workload
from flopwise.work.operation import SCORES

TOP = 5  # tensors shown of each block
_BLOCK = re.compile(r"^((?:.*?\.)?\d+)(?:\.|$)")


def saved_blocks(tensors: Iterable[SavedTensor]) -> tuple[SavedBlock, ...]:
    """Tensors by block, in the order of the model; neighbours that keep the same are one row.

    >>> one = dict(bytes=8, owner="activations", op="mm", saved_by="", shape=(2,), dtype="fp32")
    >>> blocks = saved_blocks(SavedTensor(module=f"blocks.{n}.mlp", **one) for n in range(3))
    >>> blocks[0].block, blocks[0].blocks, blocks[0].bytes
    ('blocks.0 … blocks.2', 3, 8)
    """
    by_block: dict[str, list[SavedTensor]] = {}
    for tensor in tensors:
        match = _BLOCK.match(tensor.module)
        by_block.setdefault(match[1] if match else "", []).append(tensor)
    groups: list[tuple[list[str], list[SavedTensor], object]] = []
    for block in sorted(by_block, key=_in_order):
        kept = sorted(by_block[block], key=lambda t: (-t.bytes, t.module, t.op))
        signature = sorted((t.bytes, t.owner, t.module.removeprefix(block), t.op, t.shape, t.dtype) for t in kept)
        if groups and groups[-1][2] == signature:
            groups[-1][0].append(block)
        else:
            groups.append(([block], kept, signature))
    return tuple(
        SavedBlock(
            block=(names[0] or "outside of blocks") if len(names) == 1 else f"{names[0]} … {names[-1]}",
            blocks=len(names),
            bytes=sum(t.bytes for t in kept),
            tensors=len(kept),
            largest=tuple(kept[:TOP]),
        )
        for names, kept, _ in groups
    )


def _in_order(block: str) -> tuple[bool, list[int], str]:
    return not block, [int(part) for part in block.split(".") if part.isdecimal()], block


def named(workload: Workload, kept: Sequence[SavedTensor]) -> tuple[NamedTensor, ...]:
    """The residual stream's tensor and attention's N × N matrix, with their sizes and how many of each are kept for backward.

    >>> from flopwise.spec.workload import workload
    >>> [one.bytes for one in named(workload("op:attention", batch=8, context=16384, attention="naive"), ())]
    [8589934592]
    """
    spec, b, t = workload.subject, workload.batch, workload.context
    if isinstance(spec, OpSpec) and spec.name == "attention":
        return (_scores(workload, (b, t, t), kept),)
    if not isinstance(spec, ModelSpec):
        return ()
    dtype = workload.recipe.weights  # autocast leaves the stream in fp32
    residual = (b, t, spec.d_model)
    return (
        NamedTensor(
            name="residual stream",
            shape=residual,
            dtype=dtype,
            bytes=math.prod(residual) * item_bytes(dtype),
            kept=sum(math.prod(x.shape) == math.prod(residual) and x.dtype == dtype for x in kept),
            note=f"batch × context × d_model; kept: all tensors of this size and type, {spec.n_layers} blocks",
        ),
        _scores(workload, (b, spec.n_heads, t, t), kept),
    )


def _scores(workload: Workload, shape: tuple[int, ...], kept: Sequence[SavedTensor]) -> NamedTensor:
    """Fused attention has no such matrix: then it is the one that naive attention would have."""
    largest = max((x for x in kept if x.owner == SCORES), key=lambda x: x.bytes, default=None)
    half = {"bf16": "bf16", "fp16": "fp16"}.get(workload.recipe.compute, "fp32")
    dtype = largest.dtype if largest is not None else half
    if largest is not None:
        note = f"batch ×{' heads ×' if len(shape) > 3 else ''} context × context"
    elif workload.recipe.attention == "naive":
        note = "not kept: forward alone, or a checkpoint computes it again"
    else:
        note = (
            f"not made: {workload.recipe.attention} never has it; naive attention would keep at least one in each block"
        )
    return NamedTensor(
        name="attention N × N matrix",
        shape=shape,
        dtype=dtype,
        bytes=largest.bytes if largest is not None else math.prod(shape) * item_bytes(dtype),
        kept=sum(x.owner == SCORES and x.bytes == largest.bytes for x in kept) if largest is not None else 0,
        note=note,
    )
