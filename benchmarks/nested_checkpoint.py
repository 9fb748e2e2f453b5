"""A training step of the reference model whose checkpoints are nested: `py:nested_checkpoint:fp32`, `:bf16`.

Blocks are halved again and again, and every half is a checkpoint inside the checkpoint of its parent. Forward keeps two
inputs; backward computes a half again, which keeps the inputs of its own halves, and so on: about 2·log2(L) inputs and one
block's activations are there at once, and a block is computed up to 1 + log2(L) times (Chen et al. 2016, section 4.4, has the
recursion; they checkpoint by hand what torch.utils.checkpoint nests).

The size comes from the variable COURSE_MEMORY_MODEL ('2.7B 4 512': model, batch, context), since a factory is given the
device alone.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flopwise.capture.model_step import ModelStep
from flopwise.lm.transformer import Angles
from flopwise.spec.workload import workload

MODEL = "COURSE_MEMORY_MODEL"
LEVERS = {"attention": "sdpa", "norm": "eager", "activation": "eager", "optimizer": "fused"}
Phases = dict[str, Callable[[], object]]


def fp32(device: torch.device) -> Phases:
    return _step(device, "fp32").phases()


def bf16(device: torch.device) -> Phases:
    return _step(device, "bf16").phases()


def _step(device: torch.device, precision: str) -> ModelStep:
    size, batch, context = os.environ.get(MODEL, "2.7B 4 512").split()
    levers: dict[str, Any] = {**LEVERS, "precision": precision}
    step = ModelStep(workload(size, batch=int(batch), context=int(context), phase="train", **levers), device)
    model: Any = step.model
    model._run_blocks = lambda x, angles: halves(list(model.blocks), x, angles)
    return step


def halves(blocks: list[Any], x: Tensor, angles: Angles) -> Tensor:
    """Run the blocks, each half of them in a checkpoint, and so within."""
    if len(blocks) == 1:
        out: Tensor = blocks[0](x, angles)
        return out
    middle = len(blocks) // 2
    for half in (blocks[:middle], blocks[middle:]):
        x = checkpoint(halves, half, x, angles, use_reentrant=False, preserve_rng_state=False)
    return x
