"""Steps whose three clocks are known beforehand: py:gpu_steps:NAME."""

import torch


def many_launches(device):
    """Five hundred kernels of a microsecond: the host needs longer to launch one than the GPU to run it."""
    x = torch.zeros(16, device=device)

    def step():
        for _ in range(500):
            x.add_(1)

    return step


def one_matmul(device):
    """One launch, milliseconds of work."""
    x = torch.randn(8192, 8192, device=device)
    return lambda: x @ x


def waits_inside(device):
    """The host asks for a value in the middle: nothing can be queued past it."""
    x = torch.randn(4096, 4096, device=device)
    return lambda: (x @ x).sum().item()


def allocates(device):
    """A quarter GiB for a moment in the first phase, an eighth kept from the second."""
    kept = []

    def first():
        kept.clear()
        torch.empty(2**28, dtype=torch.uint8, device=device)

    return {"first": first, "second": lambda: kept.append(torch.empty(2**27, dtype=torch.uint8, device=device))}
