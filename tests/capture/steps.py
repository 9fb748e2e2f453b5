"""Steps of a user's own, good and bad, for the tests: py:steps:NAME."""

import os
import signal
import sys
import time

import torch


def matmul(device):
    x = torch.randn(64, 64, device=device)
    return lambda: x @ x


def phases(device):
    state = []
    return {"forward": lambda: state.append(1), "backward": lambda: state.pop()}


def chatty(device):
    print('{"event": "done", "status": "ok"}', flush=True)  # what a step prints is not an event
    return lambda: sys.stdout.write("noise\n")


def crashes(device):
    return lambda: os.kill(os.getpid(), signal.SIGSEGV)


def killed(device):
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


def exits(device):
    return lambda: os._exit(7)


def quits(device):
    return lambda: sys.exit(3)


def raises(device):
    def step():
        raise ValueError("no\nluck")

    return step


def out_of_memory(device):
    return lambda: torch.empty(2**50)


def fails_after_five(device):
    calls = []

    def step():
        calls.append(1)
        if len(calls) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return step


def hangs(device):
    return lambda: time.sleep(1000)


def hangs_deaf(device):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return lambda: time.sleep(1000)


def slow(device):
    return lambda: time.sleep(0.02)


def wrong_return(device):
    return 42


def wrong_phase(device):
    return {"step": lambda: None, "other": lambda: None}


not_callable = 5


def trains(device):
    """A step of one piece: forward, loss, backward and optimizer, as many people write it."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 5)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(16, 8, device=device), torch.zeros(16, dtype=torch.long, device=device)

    def step():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def reads_a_number(device):
    x = torch.randn(4, device=device)
    return lambda: x.sum().item()


def wants_cuda(device):
    return lambda: torch.zeros(4, device="cuda")
