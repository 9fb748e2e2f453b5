"""Training steps with a fault that can be planted in each: what benchmarks/agreement_study.py judges.

Four causal language models, written by different hands: one file as many are, transformers' Llama and GPT-2, and torch.nn's
own encoder layers. All train alike: micro-batches whose gradients are averaged, clipping, AdamW with a decayed group.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {  # width, layers, heads, vocabulary, context, batch
    "tiny": (64, 3, 4, 512, 48, 4),
    "real": (512, 6, 8, 8192, 256, 8),
}
MICRO, BATCHES = 2, 8  # batches whose gradients are averaged; different steps
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A GPT as one file has it: learned positions, and the head's weight is the embedding's."""

    def __init__(self, width: int, layers: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if "proj" in name or "mlp.2" in name else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Encoder(nn.Module):
    """torch.nn's own layers, with a causal mask."""

    def __init__(self, width: int, layers: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)
        for embedding in (self.embedding, self.positions):  # as PyTorch's tutorial has it
            nn.init.uniform_(embedding.weight, -0.1, 0.1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.encoder(x, mask=self.mask, is_causal=True))


def _llama(width: int, layers: int, heads: int, vocab: int, context: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context,
    )
    return _Logits(LlamaForCausalLM(config))


def _gpt2(width: int, layers: int, heads: int, vocab: int, context: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocab, "n_positions": context}
    return _Logits(GPT2LMHeadModel(GPT2Config(**sizes, **off)))


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt": Gpt, "llama": _llama, "gpt2": _gpt2, "encoder": Encoder}

# --- the faults


def _sdpa_without_scale(attention: Callable[..., Tensor], q: Tensor, *rest: Any, **options: Any) -> Tensor:
    return attention(q, *rest, **(options | {"scale": 1.0}))


def _sdpa_sees_the_next(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any
) -> Tensor:
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(1)
    return attention(q, k, v, **(options | {"attn_mask": allowed, "is_causal": False}))


ATTENTION_FAULTS = {"scale left out": _sdpa_without_scale, "mask off by one": _sdpa_sees_the_next}


@contextmanager
def _attention(fault: str) -> Iterator[None]:
    wrong, right = ATTENTION_FAULTS.get(fault), F.scaled_dot_product_attention
    if wrong is not None:
        F.scaled_dot_product_attention = lambda *args, **options: wrong(right, *args, **options)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = right


def _norms(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if type(one).__name__.endswith(("LayerNorm", "RMSNorm"))]


def _in_half(norm: nn.Module, dtype: torch.dtype) -> None:
    """All of a norm in half precision, its statistics as well."""

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            half, weight = x.to(dtype), norm.weight.to(dtype)
            if (bias := getattr(norm, "bias", None)) is not None:
                half = half - half.mean(-1, keepdim=True)
            eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-5))
            y = half * torch.rsqrt(half.square().mean(-1, keepdim=True) + eps) * weight
            return (y if bias is None else y + bias.to(dtype)).to(x.dtype)

    norm.forward = forward


def _without_residual(model: nn.Module) -> None:
    """The last block's second residual connection is dropped."""
    norm = [one for name, one in model.named_modules() if name.endswith(("ln_2", "post_attention_layernorm", "norm2"))][
        -1
    ]
    mlp = [one for name, one in model.named_modules() if name.endswith(("mlp", "linear2"))][-1]
    inputs: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    mlp.register_forward_hook(lambda *call: call[2] - inputs.pop().to(call[2].dtype))


def _plant(model: nn.Module, fault: str, dtype: torch.dtype) -> None:
    name, _, size = fault.partition(":")
    if name == "wrong eps":
        for norm in _norms(model):
            attribute = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
            setattr(norm, attribute, float(size or 1e-3))
    elif name == "norm in half":
        norms = _norms(model)
        for norm in norms if size != "1" else norms[-1:]:
            _in_half(norm, dtype)
    elif name == "residual dropped":
        _without_residual(model)
    elif name == "weight not trained":
        next(weight for weight in reversed(list(model.parameters()))).requires_grad_(False)


def _optimizer(model: nn.Module, fault: str) -> torch.optim.Optimizer:
    decayed = [one for one in model.parameters() if one.requires_grad and one.dim() > 1]
    others = [one for one in model.parameters() if one.requires_grad and one.dim() < 2]
    name, _, size = fault.partition(":")
    rate = 3e-4 * (1 + float(size or 0.1)) if name == "rate off" else 3e-4
    decay = 0.0 if name == "weight decay lost" else float(size) if name == "with decay" else 0.1
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def make(
    device: torch.device,
    model: str = "gpt",
    precision: str = "fp32",
    fault: str = "",
    seed: int = 0,
    size: str = "tiny",
    nudge: int = 0,
) -> Callable[[], Tensor]:
    """A training step; `fault` is one of FAULTS or MORE, or '' for none. `seed`: of the weights and the data.

    `nudge`: not 0 moves every weight by up to one unit in the last place of fp32. It is the same step then, with roundings
    of its own, as another order of sums gives them.
    """
    width, layers, heads, vocab, context, batch = SIZES[size]
    torch.manual_seed(seed)
    net = MODELS[model](width, layers, heads, vocab, context).to(device)
    if nudge:
        with torch.no_grad():
            moves = torch.Generator(device).manual_seed(nudge)
            for weight in net.parameters():
                weight.mul_(1 + 2.0**-22 * (torch.rand(weight.shape, generator=moves, device=device) - 0.5))
    _plant(net, fault, HALF.get(precision, torch.bfloat16))
    optimizer = _optimizer(net, fault)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=precision == "fp16")
    name, number = fault.partition(":")[0], 0
    # Frequent tokens and rare ones, as text has. Batches lie on the device, and so does the number of the next: a CUDA graph
    # that replays the step gets the next one too.
    drawn = torch.rand(BATCHES, MICRO, batch, context + 2, generator=torch.Generator().manual_seed(seed))
    batches, at = (drawn**3 * vocab).long().to(device), torch.zeros(1, dtype=torch.long, device=device)

    def load() -> Tensor:
        tokens = batches.index_select(0, at % BATCHES)[0]
        if name != "stale batch":
            at.add_(1)
        return tokens

    def autocast() -> Any:
        return torch.autocast(device.type, dtype=HALF[precision]) if precision in HALF else nullcontext()

    def step() -> Tensor:
        nonlocal number
        number += 1
        tokens = load()
        total = torch.zeros((), device=device)
        shift = 2 if name == "targets shifted" else 1
        for part in tokens:
            with autocast(), _attention(fault):
                logits = net(part[:, :context])
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, shift : shift + context].flatten())
            scaler.scale(loss if name == "gradients summed" else loss / MICRO).backward()
            total += loss.detach() / MICRO
        scaler.unscale_(optimizer)
        if name != "clipping lost":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if name != "update skipped" or number % 2:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


FAULTS = (
    "scale left out",
    "wrong eps",
    "mask off by one",
    "stale batch",
    "residual dropped",
    "gradients summed",
    "weight decay lost",
    "norm in half",
    "targets shifted",
)
MORE = (  # smaller, and others
    "wrong eps:1e-4",
    "wrong eps:2e-5",
    "norm in half:1",
    "with decay:0.09",
    "rate off:0.01",
    "update skipped",
    "weight not trained",
)
