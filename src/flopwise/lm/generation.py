"""Generation with a cache of keys and values: a prompt read at once (prefill), then one token of each sequence (decode)."""

import torch
from torch import Tensor

from flopwise.lm.attention import Attend, attention_function
from flopwise.lm.transformer import Attention, Transformer


class CachedAttention:
    """One layer's attention, with the keys and values of all positions: a prompt's are kept, and a new token sees them all."""

    def __init__(self, attend: Attend, see_all: Attend, keys: Tensor, values: Tensor) -> None:
        self.attend, self.see_all, self.keys, self.values = attend, see_all, keys, values

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = k.shape[-2]
        place = slice(0, new) if new > 1 else slice(self.keys.shape[-2] - 1, None)
        self.keys[:, :, place], self.values[:, :, place] = k, v
        return self.attend(q, k, v) if new > 1 else self.see_all(q, self.keys, self.values)


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
        spec, device = model.spec, model.head_weight.device
        self.model, self.past = model, past
        see_all = attention_function(model.recipe.attention, model.recipe.compile != "off", causal=False)
        for module in model.modules():
            if isinstance(module, Attention):
                sizes = (2, batch, spec.n_kv_heads, past + 1, spec.head_dim)
                keys, values = torch.randn(sizes, dtype=dtype, device=device)
                module.attend = CachedAttention(module.attend, see_all, keys, values)

    def __call__(self, tokens: Tensor) -> Tensor:
        hidden = self.model.hidden(tokens, self.past if tokens.shape[1] == 1 else 0)
        logits: Tensor = self.model.head(hidden[:, -1:])
        return logits
