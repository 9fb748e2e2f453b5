"""Steps that stand for a user's own, small enough to be dry-run in a moment."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, VOCAB, BATCH, CONTEXT = 64, 4, 2, 256, 2, 32


def trained(model, loss, device, **options):
    """A step that trains the model with AdamW."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT), device=device)

    def step():
        value = loss(model, tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.fused = fused

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.fused else written_out(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


def written_out(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class GPT(nn.Module):
    def __init__(self, fused=True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList(Block(fused) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, with_loss=True):
        x = self.embed(tokens)
        for block in self.h:
            x = block(x)
        return loss_of(self.head(x), tokens) if with_loss else self.head(x)


def gpt(device):
    return trained(GPT(), lambda model, tokens: model(tokens), device)


def loss_outside(device):
    return trained(GPT(), lambda model, tokens: loss_of(model(tokens, with_loss=False), tokens), device)


def written_out_gpt(device):
    return trained(GPT(fused=False), lambda model, tokens: model(tokens), device)


def fused_on_a_gpu(device):
    return trained(GPT(), lambda model, tokens: model(tokens), device, fused=device.type == "cuda")


def llama(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False))
    return trained(model, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss, device)


def perceptron(device):
    """Nothing but matmuls and an activation."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return trained(model, lambda model, tokens: model(tokens[:, :8].float()).pow(2).mean(), device)
