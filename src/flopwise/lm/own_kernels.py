"""flopwise's own kernels, imported when a recipe asks for them: they need Triton, and nothing else does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from flopwise.errors import Unsupported
from flopwise.spec.recipe import FP8, OWN_OPTIMIZERS, Recipe

_OWN: dict[str, tuple[str, ...]] = {
    "attention": ("flash",),
    "norm": ("triton",),
    "activation": ("triton",),
    "rope": ("triton",),
    "precision": FP8,
}
_OWN |= {"loss": ("fused",), "optimizer": OWN_OPTIMIZERS}


@contextmanager
def needs_triton(asked: str) -> Iterator[None]:
    """Around the import of a kernel: without Triton one clear line that says what was `asked` for."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        hint = "pip install triton, or choose another"
        raise Unsupported(f"{asked} needs Triton, which is not installed here", hint) from None


def own_operation(name: str, asked: str) -> Callable[..., Tensor]:
    """The kernel of one operation.

    >>> own_operation("swiglu", "activation = 'triton'").__name__
    'swiglu'
    """
    with needs_triton(asked):
        from flopwise.kernels.rms_norm import rms_norm
        from flopwise.kernels.rope import rope
        from flopwise.kernels.softmax import softmax
        from flopwise.kernels.swiglu import swiglu
    operations: dict[str, Callable[..., Tensor]]
    operations = {"rms_norm": rms_norm, "rope": rope, "softmax": softmax, "swiglu": swiglu}
    return operations[name]


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
