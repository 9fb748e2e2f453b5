"""Models that are patched in tests: tiny ones of transformers, and GPTs in one file, each with its own way to write attention."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.patch.patched import Patched

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
VIT = {name: size for name, size in BERT.items() if name != "vocab_size"} | {"image_size": 16, "patch_size": 4}


def hugging_face(name: str, **settings: Any) -> nn.Module:
    """A tiny random model: 'Llama', 'Gemma2', 'GPT2', 'ViT', …"""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if name == "GPT2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | settings))
    if name == "ViT":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT | settings))
    config = getattr(transformers, f"{name}Config")(**LLAMA | settings)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def loss_of(model: nn.Module, **more: Any) -> Tensor:
    """The loss of one batch, the same for all."""
    generator = torch.Generator().manual_seed(1)
    if not hasattr(model, "config"):
        return model(torch.randint(1, 64, (2, 16), generator=generator))
    if model.config.model_type == "vit":
        return model(pixel_values=torch.randn(2, 3, 16, 16, generator=generator), labels=torch.tensor([0, 1])).loss
    ids = torch.randint(3, 64, (2, 16), generator=generator)
    return model(input_ids=ids, labels=ids, **more).loss


def gradients(model: nn.Module, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and every gradient."""
    model.zero_grad()
    loss = loss_of(model, **more)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(model: nn.Module, other: nn.Module, atol: float = 2e-6, **more: Any) -> None:
    """Loss and every gradient but for rounding."""
    (loss, mine), (expected, theirs) = gradients(model, **more), gradients(other, **more)
    torch.testing.assert_close(loss, expected, atol=atol, rtol=1e-5)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            mine[name], gradient, atol=atol, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_patch(model: nn.Module, replace: Callable[[nn.Module, Patched], int], steps: int = 2, **more: Any) -> Patched:
    """Patched, a model computes and trains as before, keeps its state_dict, and is what it was when the patch is undone."""
    plain, patched = copy.deepcopy(model), Patched()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replace(model, patched)
    for _ in range(steps):
        assert_alike(model, plain, **more)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    assert_alike(model, plain, **more)
    done, refused = list(patched.done), list(patched.refused)
    patched.undo()
    assert not [one for one in model.modules() if "forward" in vars(one)]
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    plain.load_state_dict(after)
    assert torch.equal(loss_of(model, **more), loss_of(plain, **more))
    patched.done, patched.refused = done, refused
    return patched


# --- GPTs in one file.


class OwnLayerNorm(nn.Module):
    """nanoGPT's, written out: the bias is optional, and eps is in the code."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        y = (x - mean) / torch.sqrt(variance + 1e-5) * self.weight
        return y if self.bias is None else y + self.bias


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, H, D] by the opposite angle, as modded-nanogpt has it."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)


class OwnAttention(nn.Module):
    def __init__(self, size: int = 32, heads: int = 4, longest: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, (size // heads) ** -0.5
        self.c_attn, self.c_proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))
        angle = torch.outer(torch.arange(longest), 0.1 ** torch.arange(size // heads // 2)).float()
        self.register_buffer("cos", angle.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angle.sin()[None, :, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (one.view(B, T, self.heads, C // self.heads) for one in self.c_attn(x).split(C, -1))
        q, k = (apply_rope(one, self.cos[:, :T], self.sin[:, :T]) for one in (q, k))
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[-2]
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = self.dropout(F.softmax(att, dim=-1))
        return att @ v


class OwnBlock(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], bias: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = OwnLayerNorm(32, bias), attention(), OwnLayerNorm(32, bias)
        self.w1, self.w3, self.w2 = (
            nn.Linear(32, 48, bias=bias),
            nn.Linear(32, 48, bias=bias),
            nn.Linear(48, 32, bias=bias),
        )
        self.fc, self.proj = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        h = self.ln_2(x)
        x = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return x + self.proj(new_gelu(self.fc(x)))


class OwnGPT(nn.Module):
    """Returns its loss."""

    def __init__(self, attention: Callable[[], nn.Module] = OwnAttention, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(64, 32)
        self.h = nn.ModuleList(OwnBlock(attention, bias) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
