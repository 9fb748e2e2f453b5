"""Losses of 200 steps: as written, with bf16 autocast alone, and with all that `tune` tries first, from the same weights.

python benchmarks/loss_curves.py hf_gpt2:batch=2 vit:batch=16 -o curves.json
"""

import argparse
import gc
import json
from pathlib import Path

import torch
from user_models import named

from flopwise.advice.bundles import BEST
from flopwise.capture.build import build_step
from flopwise.capture.compared_steps import StepFollower, follow_steps
from flopwise.errors import Unsupported
from flopwise.spec.workload import workload

SHOWN = (1, 10, 50, 100, 150, 200)


def losses(
    target: str, arguments: dict[str, int], levers: dict[str, str], device: torch.device, steps: int
) -> list[float]:
    follower = StepFollower(steps)
    step = build_step(workload(target, set=arguments, **levers), device, follower)
    found = follow_steps(step, follower).losses
    del step, follower
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [found[number] for number in sorted(found)]


def with_all(
    target: str, arguments: dict[str, int], device: torch.device, steps: int
) -> tuple[list[float], dict[str, str]]:
    """With every lever of the bundle that the step can have."""
    levers = dict(BEST) if device.type == "cuda" else {name: BEST[name] for name in ("precision", "optimizer", "loss")}
    while levers:
        try:
            return losses(target, arguments, levers, device, steps), levers
        except Unsupported as error:
            refused = [name for name in error.levers if name in levers] or [
                "overlap" if "overlap" in levers else "loss"
            ]
            levers = {name: value for name, value in levers.items() if name not in refused}
    raise SystemExit(f"{target}: no lever goes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="NAME[:ARGUMENT=NUMBER,…]")
    parser.add_argument("-o", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--file", default="benchmarks/user_models.py")
    asked = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kept: dict[str, dict[str, list[float]]] = {}
    shown = [number for number in SHOWN if number <= asked.count]
    print("| step | losses after | " + " | ".join(map(str, shown)) + " | largest difference | mean of the last 50 |")
    print("| :-- | :-- | " + "--: | " * (len(shown) + 2))
    for step in asked.steps:
        name, arguments = named(step)
        target = f"{asked.file}:{name}"
        original = losses(target, arguments, {}, device, asked.count)
        half = losses(target, arguments, {"precision": "bf16"}, device, asked.count)
        tuned, levers = with_all(target, arguments, device, asked.count)
        curves = {"as written": original, "bf16 autocast": half, f"tuned ({' '.join(levers)})": tuned}
        for kind, curve in curves.items():
            off = [abs(a - b) for a, b in zip(curve, original, strict=True)]
            numbers = " | ".join(f"{curve[number - 1]:.4f}" for number in shown)
            print(
                f"| {step} | {kind} | {numbers} | {max(off):.4f} | {sum(off[-50:]) / len(off[-50:]):.4f} |", flush=True
            )
        kept[step] = curves
        if asked.o:
            asked.o.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
