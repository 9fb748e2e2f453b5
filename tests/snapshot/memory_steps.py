"""Steps of a user's own for the tests of memory: py:memory_steps:NAME."""

import torch


def leaks(device):
    """Each step keeps a thousand numbers."""
    kept, layer = [], torch.nn.Linear(16, 16).to(device)

    def step():
        kept.append(torch.zeros(1000, device=device))
        layer(torch.ones(4, 16, device=device)).sum().backward()

    return step


def runs_out(device):
    """A mebibyte in each of three steps, then a pebibyte."""
    kept = []

    def step():
        kept.append(torch.zeros(2**20 if len(kept) < 3 else 2**50, dtype=torch.uint8, device=device))

    return {"forward": step}
