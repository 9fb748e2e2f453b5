"""The precision lever: what dtype weights have, what autocast does, and whether fp32 matmuls are really fp32."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, cast

import torch
from torch import Tensor

from flopwise import torch_private
from flopwise.spec.dtypes import named
from flopwise.spec.fp8 import SINCE
from flopwise.spec.recipe import Recipe

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype for a precision's tensors.

    >>> torch_dtype("bf16-pure"), torch_dtype("tf32")
    (torch.bfloat16, torch.float32)
    """
    return cast("torch.dtype", getattr(torch, named(name).torch))


def weights_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of weights and gradients, and of the moments that torch's optimizers keep.

    >>> weights_dtype(Recipe(precision="bf16")), weights_dtype(Recipe(precision="bf16-pure"))
    (torch.float32, torch.bfloat16)
    """
    return torch.bfloat16 if recipe.weights == "bf16" else torch.float32


def autocast(recipe: Recipe, device_type: str) -> AbstractContextManager[object]:
    """Matmuls in half precision for bf16 and fp16; nothing for the rest."""
    dtype = _AUTOCAST.get(recipe.precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def apply_fp32_matmul(recipe: Recipe) -> None:
    """Allow TF32 for precision = tf32 and forbid it otherwise, for the whole process.

    Both calls belong to PyTorch's older TF32 interface: from 2.9 on, reading it raises once the newer
    (`fp32_precision`) has been used in the same process, and torch.compile reads it.
    """
    allowed = recipe.precision == "tf32"
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has fp8 tensor cores of the formats that our kernels write."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= SINCE


def on_fake_tensors() -> bool:
    """Whether tensors made here and now are fake: those of a dry run, which stand for a GPU's whatever device they name.

    >>> on_fake_tensors()
    False
    """
    return torch_private.in_fake_mode()


def fp32_matmul_probe(
    device: torch.device | str, size: int = 512, matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul
) -> Literal["ieee", "tf32", "lower"]:
    """What an fp32 matmul on this device does to its inputs right now, read off a product with the identity.

    fp32 keeps 23 bits after the binary point, TF32 and fp16 keep 10, bf16 keeps 7; fp16 ends at 65504.

    >>> apply_fp32_matmul(Recipe())
    >>> fp32_matmul_probe("cpu", size=64)
    'ieee'
    """

    def survives(value: float) -> bool:
        numbers = torch.full((size, size), value, dtype=torch.float32, device=device)
        return torch.equal(matmul(numbers, torch.eye(size, dtype=torch.float32, device=device)), numbers)

    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
        if survives(1 + 2**-12 + 2**-23):
            return "ieee"
        return "tf32" if survives(2**20 * (1 + 2**-10)) else "lower"
