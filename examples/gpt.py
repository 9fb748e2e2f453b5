"""A small GPT trained on text of random words, written as the usual single-file scripts are: flopwise run examples/gpt.py

`make_step` is the same step for `flopwise tune examples/gpt.py:make_step`.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import flopwise

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--context", type=int, default=128)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--recipe", help="a file that flopwise tune --save wrote")
asked = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 4096


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, asked.width), nn.Embedding(asked.context, asked.width)
        self.blocks = nn.ModuleList([Block(asked.width, asked.width // 64) for _ in range(asked.layers)])
        self.norm, self.head = nn.LayerNorm(asked.width), nn.Linear(asked.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def get_batch(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, len(text) - asked.context - 1, (asked.batch,))
    both = torch.stack([text[s : s + asked.context + 1] for s in starts]).to(device)
    return both[:, :-1], both[:, 1:]


def make_step(device: str, layers: int = 4, width: int = 256, batch: int = 8) -> Callable[[], torch.Tensor]:
    asked.layers, asked.width, asked.batch = layers, width, batch
    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    words = torch.randint(0, VOCABULARY, (batch, asked.context + 1), device=device)

    def step() -> torch.Tensor:
        loss = model(words[:, :-1], words[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def main() -> None:
    torch.manual_seed(0)
    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    if asked.recipe:
        flopwise.apply(model, optimizer, recipe=asked.recipe)
    called = torch.compile(model) if asked.compile else model
    text = torch.randint(0, VOCABULARY, (1_000_000,))
    for step in range(asked.steps):
        for _ in range(asked.accumulate):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = called(*get_batch(text)) / asked.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item() * asked.accumulate:.3f}")


if __name__ == "__main__":
    main()
