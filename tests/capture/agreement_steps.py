"""A small training step with faults that can be planted in it: py:agreement_steps:make."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class HalfNorm(nn.Module):
    """A norm that computes in bf16."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x):
        y = x.bfloat16() - x.bfloat16().mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return (y * self.weight.bfloat16() + self.bias.bfloat16()).to(x.dtype)


def make(device, precision="fp32", fault="", nudge=0, dropout=0.0, draws_first=False):
    """`nudge` moves weights by a unit in the last place; `draws_first` draws a number more than it needs."""
    width, vocab, size = 32, 128, (4, 24)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(vocab, width), nn.Dropout(dropout), *(Block(width) for _ in range(3)), nn.Linear(width, vocab)
    ).to(device)
    with torch.no_grad():
        moves = torch.Generator(device).manual_seed(nudge)
        for weight in model.parameters() if nudge else ():
            weight.mul_(1 + 2.0**-22 * (torch.rand(weight.shape, generator=moves, device=device) - 0.5))
    for block in model[2:-1] if fault == "eps" else ():
        block.norm.eps = 1e-2
    if fault == "frozen":
        model[2].norm.weight.requires_grad_(False)
    for block in model[2:-1] if fault == "half norm" else ():
        block.norm = HalfNorm(block.norm)
    decay, rate = 0.0 if fault == "no decay" else 0.1, 1.05e-3 if fault == "rate" else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    data = torch.Generator(device).manual_seed(1)
    held = []

    def step():
        if draws_first:
            torch.rand(1, device=device)
        drawn = torch.randint(vocab, (2, size[0], size[1] + 2), generator=data, device=device)
        held[:] = held if fault == "stale" and held else [drawn]
        total = 0.0
        for part in held[0]:
            with torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
                logits = model(part[:, :-2])
            targets = part[:, 2:] if fault == "shifted" else part[:, 1:-1]
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            (loss if fault == "summed" else loss / 2).backward()
            total += loss.detach() / 2
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


class Cast(nn.Linear):
    """A layer that casts by hand, as some training scripts do."""

    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


def casts(device, nudge=0, scale=1.0):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Cast(32, 32) for _ in range(4))).to(device), torch.randn(64, 32, device=device)
    with torch.no_grad():
        for weight in model.parameters() if nudge else ():
            weight.mul_(
                1 + 2.0**-9 * (torch.rand(weight.shape, device=device) - 0.5)
            )  # as other kernels round otherwise
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = scale * model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
