"""Activations computed again: the blocks' forward operations once more, before each block's backward pass."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from flopwise.errors import Unsupported
from flopwise.predict.fusion import repeated_blocks
from flopwise.records.prediction import PredictedStep
from flopwise.work.operation import OpWork


def with_recomputation(ops: Sequence[OpWork], value: str, step: PredictedStep) -> Sequence[OpWork]:
    """The step with every block checkpointed."""
    block_of, forward = repeated_blocks(ops), dict[str, list[OpWork]]()
    saved = defaultdict[str | None, set[int]](set)
    for op in ops:
        if op.phase == "backward":
            saved[block_of(op)] |= {tensor for tensor, _ in op.reads}
        if op.phase == "forward" and (block := block_of(op)) is not None:
            forward.setdefault(block, []).append(msgspec.structs.replace(op, phase="recompute"))
    forward = {block: _until_enough(again, saved[block]) for block, again in forward.items()}
    if not forward or not any(op.phase == "backward" for op in ops):
        raise Unsupported("checkpoint finds no blocks in this step", "keep the model's layers in an nn.ModuleList")
    found = list[OpWork]()
    for op in ops:
        block = block_of(op) if op.phase == "backward" else None
        found += forward.pop(block, []) if block is not None else []
        found.append(op)
    return found


def _until_enough(again: list[OpWork], saved: set[int]) -> list[OpWork]:
    """A segment is computed until all that its backward pass reads is there: its last product is not."""
    wanted = [place for place, op in enumerate(again) if any(tensor in saved for tensor, _ in op.writes)]
    return again[: max(wanted, default=-1) + 1]
