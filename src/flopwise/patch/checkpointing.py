"""Activations computed again in the backward pass, block by block."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.errors import Unsupported
from flopwise.patch.patched import Patched


def recompute(blocks: Sequence[nn.Module], patched: Patched, *, keep_random: bool) -> None:
    """Keep only each block's inputs. `keep_random`: save the generator's state, which a captured graph cannot."""
    counting = next((type(one).__name__ for block in blocks for one in block.modules() if _counts(one)), "")
    if counting:
        raise Unsupported(
            f"checkpoint: {type(blocks[0]).__name__} holds {counting}, whose running statistics would count each batch twice",
            "omit checkpoint",
        )
    for block in blocks:
        patched.set(block, "forward", _recomputed(block.forward, keep_random))
    patched.done.append(f"checkpoint: {len(blocks)} × {type(blocks[0]).__name__} are computed again in backward")


def _counts(module: nn.Module) -> bool:
    return bool(getattr(module, "track_running_stats", False)) and module.training


def _recomputed(forward: Callable[..., Any], keep_random: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=keep_random, **kwargs)

    return run
