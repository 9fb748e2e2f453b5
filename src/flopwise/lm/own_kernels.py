"""flopwise's own kernels, imported when a recipe asks for them: they need Triton, and nothing else does."""

import importlib
from typing import Any

from flopwise.errors import Unsupported


def own_kernel(operation: str, asked: str) -> Any:
    """The module of `kernels/` for an operation; without Triton one clear line that says what was `asked` for.

    >>> own_kernel("swiglu", "activation = 'triton'").swiglu.__name__
    'swiglu'
    """
    try:
        return importlib.import_module(f"flopwise.kernels.{operation}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise Unsupported(
            f"{asked} needs Triton, which is not installed here", "pip install triton, or choose another"
        ) from None
