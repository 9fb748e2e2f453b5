"""Attention masks that transformers leaves out in eager code and makes as tensors under a compiler or a graph's capture.

Without a mask tensor, SDPA runs its causal kernels; with one, slower ones, and a compiled block is another case. Whether a
mask is needed depends on values only where the user gives an attention mask or positions. Where neither is given, what the
first eager call found holds for all calls of that shape.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flopwise.patch.patched import Patched

_GIVEN = ("attention_mask", "position_ids", "past_key_values")


def keep_masks_away(roots: Sequence[nn.Module], patched: Patched) -> bool:
    """Remember where eager code needed no mask; says whether there is anything to remember."""
    modules = [module for root in roots for module in root.modules()]
    files = {name: sys.modules[name] for module in modules if (name := type(module).__module__) in sys.modules}
    makers = [(file, name) for file in files.values() for name in vars(file) if _makes_mask(file, name)]
    if not makers:
        return False
    memory = _Memory()
    for root in roots:
        memory.watch(root, patched)
    for file, name in makers:
        patched.set(file, name, memory.wrapped(name, getattr(file, name)))
    return True


def _makes_mask(file: ModuleType, name: str) -> bool:
    """transformers.masking_utils' functions, as the models' files import them."""
    if not (name.startswith("create_") and name.endswith("_mask")):
        return False
    return getattr(getattr(file, name), "__module__", "") == "transformers.masking_utils"


class _Memory:
    """Which masks were not needed."""

    def __init__(self) -> None:
        self.values_given = True  # by the user, to the call of the model that is running
        self.needless: dict[tuple[Any, ...], bool] = {}

    def watch(self, root: nn.Module, patched: Patched) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.values_given = len(args) > 1 or any(kwargs.get(name) is not None for name in _GIVEN)

        handle = root.register_forward_pre_hook(before, with_kwargs=True)
        patched.on_undo(handle.remove)

    def wrapped(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)  # and so another model's turn finds it, too
        def mask(*args: Any, **kwargs: Any) -> Any:
            inputs = kwargs.get("inputs_embeds", kwargs.get("input_embeds"))
            if self.values_given or inputs is None or kwargs.get("attention_mask") is not None:
                return make(*args, **kwargs)
            if not torch.is_grad_enabled():  # a cache may be filled, whose length counts
                return make(*args, **kwargs)
            config = kwargs.get("config", args[0] if args else None)
            key = (name, id(config), *inputs.shape)
            if self.needless.get(key, False):
                return None
            made = make(*args, **kwargs)
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if made is None and not torch.compiler.is_compiling() and not capturing:
                self.needless[key] = True
            return made

        return mask
