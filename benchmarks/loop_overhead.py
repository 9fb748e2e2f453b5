"""What watching a loop costs: steps unwatched, while they are timed, traced, and after the look, in turns; ratios of medians.

python benchmarks/loop_overhead.py [--width 1024] [--layers 8] [--batch 64] [--rounds 8]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from flopwise.api.watch import Watch
from flopwise.capture.loop.watcher import TIMING, TRACING

STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 1024), ("layers", 8), ("batch", 64), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [nn.Sequential(nn.Linear(asked.width, asked.width), nn.GELU()) for _ in range(asked.layers)]
    model = nn.Sequential(*layers).to(device)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(asked.batch, asked.width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    found: dict[str, list[float]] = {}
    for _ in range(asked.rounds):
        for kind, ms in one_round(step, device).items():
            found.setdefault(kind, []).append(ms)
    plain = median(found["unwatched"])
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; {asked.rounds} rounds of {STEPS} steps each")
    print("| steps | ms, median | ratio |\n| :-- | --: | --: |")
    for kind, each in found.items():
        ratio = median([a / b for a, b in zip(each, found["unwatched"], strict=True)])
        print(f"| {kind} | {median(each):.3f} | {ratio:.3f} |")
    print(f"\nunwatched: {plain:.3f} ms")


def one_round(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Mean milliseconds of a step, by what the watcher does meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(steps=STEPS, traced=STEPS, seconds=0.5, runs=folder)
        took = {"unwatched": timed(step, device, STEPS)}
        watch.open()
        watcher = watch._watcher
        assert watcher is not None
        while watcher.stage != TIMING:
            step()
        took["timed"] = timed(step, device, STEPS - 1)
        while watcher.stage != TRACING:
            step()
        step()  # the profiler's own warm-up
        took["traced"] = timed(step, device, STEPS - 1)
        while not watch.over:
            step()
        took["after the look"] = timed(step, device, STEPS)
        watch.close()
    return took


def timed(step: Callable[[], None], device: torch.device, count: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


if __name__ == "__main__":
    main()
