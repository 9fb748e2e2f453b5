"""Training steps as other people write them: transformers models from a config, a single-file GPT, torch.nn's encoder, a ViT.

    flopwise tune benchmarks/user_models.py:hf_llama --budget 150s

Random weights, random tokens, plain AdamW. `plain_*` is the same step with what plain PyTorch offers: bf16 autocast, SDPA,
torch.compile, fused AdamW.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], torch.Tensor]


def hf_step(
    model: nn.Module, device: torch.device, vocabulary: int, batch: int, context: int, plain: bool = False
) -> Step:
    """One training step of a causal language model of transformers."""
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if plain else None)
    tokens = torch.randint(0, vocabulary, (batch, context), device=device)
    called = torch.compile(model) if plain else model

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16) if plain else nullcontext():
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


def hf_llama(device: torch.device, plain: bool = False, layers: int = 16, batch: int = 4) -> Step:
    """The size of Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128_256,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return hf_step(model, device, config.vocab_size, batch, 1024, plain)


def hf_qwen3(device: torch.device, plain: bool = False, layers: int = 28, batch: int = 4) -> Step:
    """The size of Qwen3 0.6B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    return hf_step(model, device, config.vocab_size, batch, 1024, plain)


def hf_gemma2(device: torch.device, plain: bool = False, layers: int = 26, batch: int = 2) -> Step:
    """The size of Gemma 2 2B: soft-capped attention and logits, 1 + w norms, sliding windows."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=2304,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        vocab_size=256_000,
        use_cache=False,
    )
    with torch.device(device):
        model = Gemma2ForCausalLM(config)
    return hf_step(model, device, config.vocab_size, batch, 1024, plain)


def hf_gpt2(device: torch.device, plain: bool = False, batch: int = 8) -> Step:
    """GPT-2, 124M, dropout off."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.device(device):
        model = GPT2LMHeadModel(config)
    return hf_step(model, device, config.vocab_size, batch, 1024, plain)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class WrittenOutAttention(SelfAttention):
    """The same with its formula."""

    def __init__(self, width: int, heads: int, context: int = 1024) -> None:
        super().__init__(width, heads)
        self.register_buffer(
            "mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, written_out: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attn = WrittenOutAttention(width, heads) if written_out else SelfAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int = 50_304,
        context: int = 1024,
        written_out: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList([GptBlock(width, heads, written_out) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def single_file_gpt(
    device: torch.device, plain: bool = False, batch: int = 12, written_out: bool = False
) -> dict[str, Callable[[], object]] | Step:
    """124M as the popular single-file scripts train it: autocast inside the step, two groups of weights, clipping."""
    with torch.device(device):
        model = Gpt(12, 768, 12, written_out=written_out)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")
    x = torch.randint(0, 50_304, (batch, 1024), device=device)
    y = torch.randint(0, 50_304, (batch, 1024), device=device)
    called = torch.compile(model) if plain else model

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            _, loss = called(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def written_out_gpt(device: torch.device, plain: bool = False, batch: int = 12) -> Step:
    """The same with attention written out."""
    return single_file_gpt(device, plain, batch, written_out=True)  # type: ignore[return-value]


def encoder(device: torch.device, plain: bool = False, batch: int = 16) -> Step:
    """nn.TransformerEncoder: a masked language model of 12 layers."""
    width, vocabulary, context = 768, 30_522, 512
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(
            width, 12, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        model = nn.ModuleDict(
            {
                "embed": nn.Embedding(vocabulary, width),
                "body": nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
                "head": nn.Linear(width, vocabulary),
            }
        )
        tokens = torch.randint(0, vocabulary, (batch, context))
        targets = torch.randint(0, vocabulary, (batch, context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if plain else None)

    def forward() -> torch.Tensor:
        hidden = model["body"](model["embed"](tokens))
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), targets.flatten())

    called = torch.compile(forward) if plain else forward

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16) if plain else nullcontext():
            loss = called()
        loss.backward()
        optimizer.step()
        return loss

    return step


def vit(device: torch.device, plain: bool = False, batch: int = 64) -> Step:
    """ViT-Base/16 of transformers on 224 × 224 images."""
    from transformers import ViTConfig, ViTForImageClassification

    with torch.device(device):
        model = ViTForImageClassification(ViTConfig(num_labels=1000)).train()
        images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if plain else None)
    called = torch.compile(model) if plain else model

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16) if plain else nullcontext():
            loss = called(pixel_values=images, labels=labels).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


MODELS = {
    one.__name__: one
    for one in (hf_llama, hf_qwen3, hf_gemma2, hf_gpt2, single_file_gpt, written_out_gpt, encoder, vit)
}


def named(step: str) -> tuple[str, dict[str, int]]:
    """
    >>> named("hf_gpt2:batch=4")
    ('hf_gpt2', {'batch': 4})
    """
    name, _, given = step.partition(":")
    return name, {key: int(value) for key, _, value in (one.partition("=") for one in given.split(",") if one)}
