"""flopwise's own kernels, imported when a recipe asks for them: they need Triton, and nothing else does."""

from typing import Any

from flopwise.errors import Unsupported
from flopwise.spec.recipe import OWN_OPTIMIZERS, Recipe

_OWN = {
    "attention": ("flash",),
    "norm": ("triton",),
    "activation": ("triton",),
    "rope": ("triton",),
    "loss": ("fused",),
    "optimizer": OWN_OPTIMIZERS,
}


def own_kernel(operation: str, asked: str) -> Any:
    """The module of `kernels/` for an operation; without Triton one clear line that says what was `asked` for.

    >>> own_kernel("swiglu", "activation = 'triton'").swiglu.__name__
    'swiglu'
    """
    try:
        from flopwise.kernels import (
            adamw,
            attention,
            attention_triton,
            cross_entropy,
            gelu,
            rms_norm,
            rope,
            softmax,
            swiglu,
        )
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise Unsupported(
            f"{asked} needs Triton, which is not installed here", "pip install triton, or choose another"
        ) from None
    modules = (adamw, attention, attention_triton, cross_entropy, gelu, rms_norm, rope, softmax, swiglu)
    return {module.__name__.rpartition(".")[2]: module for module in modules}[operation]


def own_levers(recipe: Recipe) -> tuple[str, ...]:
    """The levers that ask for our kernels.

    >>> own_levers(Recipe(norm="triton", loss="fused"))
    ('norm triton', 'loss fused')
    """
    asked = {lever: getattr(recipe, lever) for lever in _OWN}
    return tuple(f"{lever} {value}" for lever, value in asked.items() if value in _OWN[lever])


def written_out(device: str, names: tuple[str, ...]) -> str:
    """On the CPU our kernels are their references in PyTorch: a time of theirs says nothing of the kernels.

    >>> written_out("cpu", ("triton",))
    'triton: written out, no GPU'
    """
    return f"{', '.join(names)}: written out, no GPU" if names and device == "cpu" else ""
