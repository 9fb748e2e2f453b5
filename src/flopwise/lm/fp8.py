"""Precision fp8 and fp8-rowwise: which products of the model run in fp8, and how its numbers are scaled.

The blocks' linear layers do; embedding, head, norms, attention and the optimizer are those of bf16-master. Scales are dynamic:
each is the amax of the numbers that it scales, of this step and no other.
"""

from typing import Any

from torch import Tensor, nn

from flopwise.lm.own_kernels import needs_triton
from flopwise.spec.recipe import FP8, Recipe

Activation = Any  # a tensor, or a layer's input with its fp8 form (kernels.fp8_linear.Input)


class Fp8:
    """The kernels under one recipe's scaling."""

    def __init__(self, recipe: Recipe) -> None:
        with needs_triton(f"precision = '{recipe.precision}'"):
            from flopwise.kernels import fp8_linear
        self.kernels = fp8_linear
        self.scaling = fp8_linear.usual_scaling(recipe.precision == "fp8-rowwise")

    def prepared(self, x: Activation) -> Activation:
        """The input of several layers, cast once."""
        return self.kernels.prepared(x, self.scaling)

    def linear(self, x: Activation, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.kernels.linear(x, weight, bias, self.scaling)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Activation:
        """RMSNorm, with its fp8 form made by the same kernel as far as the scaling allows."""
        return self.kernels.normed(x, weight, eps, self.scaling)

    def gated_linear(self, x: Activation, weight: Tensor, bias: Tensor | None) -> Activation:
        """A layer of gate and up, and SwiGLU's pointwise half: likewise, also going back."""
        return self.kernels.gated_linear(x, weight, bias, self.scaling)

    def gated(self, gate: Tensor, up: Tensor) -> Activation:
        """SwiGLU's pointwise half, likewise."""
        return self.kernels.gated(gate, up, self.scaling)


def fp8_of(recipe: Recipe) -> Fp8 | None:
    """None where the recipe has no fp8."""
    return Fp8(recipe) if recipe.precision in FP8 else None


def in_fp8(blocks: nn.Module, fp8: Fp8 | None) -> None:
    """Let every layer of the blocks that knows fp8 use it."""
    for module in blocks.modules() if fp8 is not None else ():
        if hasattr(module, "fp8"):
            setattr(module, "fp8", fp8)  # noqa: B010  nn.Module's own annotation is of tensors and modules
