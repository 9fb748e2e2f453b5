"""Linear layers of a user's model in fp8: those of its blocks, on request only."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flopwise.errors import Unsupported
from flopwise.patch.checked import forward_of, put_forward
from flopwise.patch.patched import Patched
from flopwise.spec.fp8 import MULTIPLE
from flopwise.torch_private import FakeTensor

SMALL = 256  # features: below that a cast costs more than the product gains
OUTSIDE, TOO_SMALL, OTHER_SIZE = "outside the blocks", f"under {SMALL} features", f"no multiple of {MULTIPLE}"
NAMED = 3  # layers of each reason that are named


def replace(root: nn.Module, blocks: Sequence[nn.Module], by_rows: bool, patched: Patched) -> str:
    """Let the blocks' linear layers multiply in fp8. How many there are and which are left out, in words."""
    chosen, left = layers(root, blocks)
    for layer in chosen:
        _put(layer, by_rows, patched)
    said = "; ".join(f"{_names(names)} ({why})" for why, names in left.items())
    if not chosen:
        raise Unsupported(f"fp8 found no linear layer{': ' + said if said else ''}", "precision = bf16-master")
    told = f"{len(chosen)} linear layers in fp8{'; not ' + said if said else ''}"
    patched.done.append(f"precision: {told}")
    return told


def layers(root: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Linear], dict[str, list[str]]]:
    """The linear layers that multiply in fp8, and by reason the names of those that do not."""
    inside = {layer for block in blocks for layer in block.modules()}
    unused = {one.out_proj for one in root.modules() if isinstance(one, nn.MultiheadAttention)}  # it reads the weight
    chosen, left = list[nn.Linear](), dict[str, list[str]]()
    for name, layer in root.named_modules():
        if _is_plain(layer) and layer not in unused:
            why = _left_out(layer, layer in inside)
        elif _multiplies(layer):
            why = f"{type(layer).__name__}, no plain nn.Linear"
        else:
            continue
        if why:
            left.setdefault(why, []).append(name)
        else:
            chosen.append(layer)
    return chosen, left


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it computes what nn.Linear does, from a weight that is its own."""
    own = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return own and not parametrize.is_parametrized(layer) and type(layer.weight) in (nn.Parameter, FakeTensor)


def _multiplies(layer: nn.Module) -> bool:
    """Whether it has a matrix that is large enough for fp8, which is no table of embeddings."""
    if isinstance(layer, nn.Embedding | parametrize.ParametrizationList):
        return False
    matrices = [layer.weight] if isinstance(layer, nn.Linear) else list(layer.parameters(recurse=False))
    return any(one.dim() > 1 and min(one.shape[-2:]) >= SMALL for one in matrices)


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
    from flopwise.kernels.fp8_linear import linear, usual_scaling

    scaling, original = usual_scaling(by_rows), forward_of(layer)

    def forward(self: nn.Module, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        assert isinstance(self, nn.Linear)
        if input.numel() == 0:
            return original(self, input)  # type: ignore[no-any-return]
        x = input.to(torch.bfloat16)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        weight, rows = self.weight.to(torch.bfloat16), x.numel() // x.shape[-1]
        if missing := -rows % MULTIPLE:  # as of tokens[:, :-1]: rows of zeros give what the tensor cores take
            y = linear(F.pad(x.reshape(rows, -1), (0, 0, 0, missing)), weight, bias, scaling)
            return y[:rows].view(*x.shape[:-1], -1)
        return linear(x, weight, bias, scaling)

    put_forward(layer, forward, patched)
