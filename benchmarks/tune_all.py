"""Tune models from naive fp32, sizes and shapes one after the other, and measure plain PyTorch in turns with what was found.

    python benchmarks/tune_all.py small:4x512:70 2.7B:16x1024:185 --keep /tmp/tuned [--beside]

Each argument is SIZE:BATCHxCONTEXT:SECONDS. The commands are those of `benchmarks/results/tune-2026-11.md`. --keep gets
each run's run.json, points.jsonl and tuning.jsonl, and the trace of its last step. With --beside, plain PyTorch (bf16 autocast,
SDPA, torch.compile of the whole, fused AdamW) follows, which takes torch.compile's time for every size.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

NAIVE = ("--attention", "naive", "--norm", "eager", "--activation", "eager", "--seconds", "1")
PLAIN = {"precision": "bf16", "compile": "default", "optimizer": "fused"}
AS_BEGUN = {"precision": "fp32", "compile": "off", "optimizer": "foreach"}  # where the recipe does not name them
KEPT = ("run.json", "points.jsonl", "tuning.jsonl", "traces/after.kineto.json.gz")


def flopwise(*args: str, runs: Path) -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", "flopwise", *args]
    done = subprocess.run(command, env=os.environ | {"FLOPWISE_RUNS": str(runs)}, capture_output=True, text=True)
    told = done.stdout if done.returncode == 0 else done.stderr
    print(f"{' '.join(args[:6])}: exit {done.returncode}, {time.monotonic() - began:.0f} s\n{told[-1500:]}", flush=True)


def keep(runs: Path, to: Path) -> None:
    """The newest run's small files."""
    made = max(runs.glob("*/run.json"), key=lambda path: json.loads(path.read_text())["created_ns"], default=None)
    if made is None:
        return
    to.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (made.parent / name).is_file():
            shutil.copy(made.parent / name, to / Path(name).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="SIZE:BATCHxCONTEXT:SECONDS")
    parser.add_argument("--keep", type=Path, required=True, metavar="DIR")
    parser.add_argument("--beside", action="store_true", help="plain PyTorch, in turns with the recipe found")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    for step in given.steps:
        size, shape, seconds = step.split(":")
        batch, context = shape.split("x")
        runs, recipe = given.keep / "runs", given.keep / f"{size}-{shape}.toml"
        workload = (size, "--batch", batch, "--context", context, "--device", given.device)
        flopwise("tune", *workload, *NAIVE, "--budget", f"{seconds}s", "--save", str(recipe), runs=runs)
        keep(runs, given.keep / f"{size}-{shape}")
        if given.beside and recipe.is_file():
            levers = AS_BEGUN | tomllib.loads(recipe.read_text())
            versus = ",".join(f"{lever}={value}" for lever, value in levers.items())
            plain = [text for lever, value in PLAIN.items() for text in (f"--{lever}", value)]
            flopwise("bench", *workload, *plain, "--versus", versus, "--seconds", "3", runs=runs)
            keep(runs, given.keep / f"{size}-{shape}-beside")


if __name__ == "__main__":
    main()
