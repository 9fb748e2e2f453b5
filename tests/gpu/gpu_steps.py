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


class Block(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out, self.dropout = (
            torch.nn.Linear(256, 768),
            torch.nn.Linear(256, 256),
            torch.nn.Dropout(dropout),
        )

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))


def transformer(device, dropout=0.0, after=lambda loss: None):
    """A training step in phases, as someone would write it."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(512, 256),
        torch.nn.Sequential(*(Block(dropout) for _ in range(6))),
        torch.nn.Linear(256, 512),
    ).to(device)
    criterion, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters())
    tokens, state = torch.randint(512, (4, 256), device=device), {}

    def forward():
        optimizer.zero_grad()
        state["loss"] = criterion(model(tokens).flatten(0, 1).float(), tokens.flatten())
        after(state["loss"])

    return {"forward": forward, "backward": lambda: state["loss"].backward(), "optimizer": optimizer.step}


def reads_its_loss(device):
    return transformer(device, after=lambda loss: loss.item())


def copies_from_the_cpu(device):
    batch = torch.randn(1000, 1000)
    return transformer(device, after=lambda loss: batch.to(device))


def with_dropout(device):
    return transformer(device, dropout=0.1)


def adds_up_its_losses(device):
    """Six micro-batches, each of which asks for its loss on the host: the queue runs dry six times."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(3))).to(device, torch.bfloat16)
    batch = torch.randn(2048, 8192, device=device, dtype=torch.bfloat16)

    def step():
        total = 0.0
        for _ in range(6):
            loss = model(batch).float().square().mean()
            loss.backward()
            total += loss.item()
        model.zero_grad(set_to_none=True)

    return step
