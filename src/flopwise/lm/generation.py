"""Generation with a cache of keys and values: a prompt read at once (prefill), then one token of each sequence (decode)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwise.lm.attention import Attend, attention_function
from flopwise.lm.transformer import Attention, Transformer


@dataclass
class Place:
    """Where the next token goes, for all layers: a number for the host, or what a CUDA graph reads."""

    length: int = 0  # tokens in the cache; where a graph counts, those when it began
    index: Tensor | None = None  # [1]: the same on the device, where a graph counts; the cache is then read whole
    mask: Tensor | None = None  # [positions]: those that the next token sees
    positions: Tensor | None = None  # 0, 1, …

    def fix(self, positions: int, device: torch.device) -> None:
        """From now on a graph can count: its shapes are fixed, so places are numbers on the device."""
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        self.mask = torch.zeros(positions, dtype=torch.bool, device=device)
        self.positions = torch.arange(positions, device=device)
        self.move(self.length)

    def move(self, length: int) -> None:
        """The next token's position is `length`."""
        self.length = length
        if self.index is not None:
            self.index.fill_(length)
            self._see()

    def advance(self) -> None:
        """One further."""
        if self.index is None:
            self.length += 1
        else:
            self.index += 1
            self._see()

    @property
    def column(self) -> slice | Tensor:
        """The next token's, of a table of tokens [B, positions]."""
        return slice(self.length, self.length + 1) if self.index is None else self.index

    def _see(self) -> None:
        if self.mask is not None and self.positions is not None and self.index is not None:
            torch.le(self.positions, self.index, out=self.mask)


class CachedAttention:
    """One layer's attention: a prompt's keys and values are kept, a new token's are added, and it sees them all."""

    def __init__(self, attend: Attend, see_all: Attend, cache: Tensor, place: Place) -> None:
        self.attend, self.see_all, self.place = attend, see_all, place
        self.keys, self.values = cache  # [B, H, positions, K]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new, place = k.shape[-2], self.place
        if new > 1 or not place.length:
            self.keys[:, :, :new], self.values[:, :, :new] = k, v
            return self.attend(q, k, v)
        if place.index is not None and place.mask is not None:
            self.keys.index_copy_(2, place.index, k.to(self.keys.dtype))
            self.values.index_copy_(2, place.index, v.to(self.keys.dtype))
            keys, values = self.keys.to(q.dtype), self.values.to(q.dtype)
            mask = place.mask[None, None, None, :]
            return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=keys.shape[1] != q.shape[1])
        last = slice(place.length, place.length + 1)
        self.keys[:, :, last], self.values[:, :, last] = k, v
        seen = slice(0, place.length + 1)
        return self.see_all(q, self.keys[:, :, seen].to(q.dtype), self.values[:, :, seen].to(q.dtype))


def keep_keys(model: Transformer, batch: int, positions: int, dtype: torch.dtype, place: Place) -> int:
    """Give every attention layer of a model a cache; returns its bytes."""
    spec, device = model.spec, model.head_weight.device
    see_all = attention_function(model.recipe.attention, model.recipe.compile != "off", causal=False)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer in layers:
        cache = torch.randn((2, batch, spec.n_kv_heads, positions, spec.head_dim), dtype=dtype, device=device)
        layer.attend = CachedAttention(layer.attend, see_all, cache, place)
    return len(layers) * 2 * batch * spec.n_kv_heads * positions * spec.head_dim * dtype.itemsize


class Generation:
    """A model that keeps keys and values. Called with a prompt [B, T] of two tokens or more, then with a token [B, 1] of each
    sequence, it gives the last position's logits [B, 1, V].

    >>> from flopwise.spec.model import preset
    >>> from flopwise.spec.recipe import Recipe
    >>> model, tokens = Transformer(preset("tiny"), Recipe(), 9), torch.arange(9)[None]
    >>> generation = Generation(model, 1, 8, torch.float32)
    >>> with torch.no_grad():
    ...     first, second = generation(tokens[:, :8]), generation(tokens[:, 8:])
    ...     torch.allclose(second, model(tokens)[:, -1:], atol=1e-5)
    True
    """

    def __init__(self, model: Transformer, batch: int, past: int, dtype: torch.dtype) -> None:
        self.model, self.past = model, past
        keep_keys(model, batch, past + 1, dtype, Place(past))

    def __call__(self, tokens: Tensor) -> Tensor:
        hidden = self.model.hidden(tokens, self.past if tokens.shape[1] == 1 else 0)
        logits: Tensor = self.model.head(hidden[:, -1:])
        return logits
