"""Linear layers of a user's model in fp8: those of its blocks, on request only."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flopwise.errors import Unsupported
from flopwise.patch.checked import forward_of, put_forward
from flopwise.patch.patched import Patched
from flopwise.spec.fp8 import MULTIPLE

SMALL = 256  # features: below that a cast costs more than the product gains
OUTSIDE, TOO_SMALL, OTHER_SIZE = "outside the blocks", f"under {SMALL} features", f"no multiple of {MULTIPLE}"
NAMED = 3  # layers of each reason that are named


def replace(root: nn.Module, blocks: Sequence[nn.Module], by_rows: bool, patched: Patched) -> int:
    """Let the blocks' linear layers multiply in fp8; says which are left out. How many there are."""
    inside = {layer for block in blocks for layer in block.modules()}
    left: dict[str, list[str]] = {}
    count = 0
    for name, layer in root.named_modules():
        if type(layer) is not nn.Linear:
            continue
        if why := _left_out(layer, layer in inside):
            left.setdefault(why, []).append(name)
            continue
        _put(layer, by_rows, patched)
        count += 1
    said = "; ".join(f"{_names(names)} ({why})" for why, names in left.items())
    if not count:
        raise Unsupported(f"fp8 found no linear layer{': ' + said if said else ''}", "precision = bf16-master")
    patched.done.append(f"precision: {count} linear layers in fp8{'; not ' + said if said else ''}")
    return count


def _left_out(layer: nn.Linear, inside: bool) -> str:
    """Why a layer stays as it is; '': it does not."""
    sizes = layer.in_features, layer.out_features
    if not inside:
        return OUTSIDE
    if min(sizes) < SMALL:
        return TOO_SMALL
    return OTHER_SIZE if any(size % MULTIPLE for size in sizes) else ""


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _put(layer: nn.Linear, by_rows: bool, patched: Patched) -> None:
    from flopwise.kernels.fp8_linear import Scaling, linear

    scaling, original = Scaling(by_rows, narrow_weight_gradient=True), forward_of(layer)

    def forward(self: nn.Module, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        """As it was for a number of rows that the tensor cores do not take."""
        assert isinstance(self, nn.Linear)
        if input.numel() == 0 or input.numel() // input.shape[-1] % MULTIPLE:
            return original(self, input)  # type: ignore[no-any-return]
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        return linear(input.to(torch.bfloat16), self.weight.to(torch.bfloat16), bias, scaling)

    put_forward(layer, forward, patched)
