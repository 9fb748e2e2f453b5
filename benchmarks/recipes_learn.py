"""Whether recipes learn: each trains the same model on the same text, beside fp32 with several seeds.

    python benchmarks/recipes_learn.py measure DATA OUT.jsonl [--steps 2000] [--jobs 6] [--seconds 240]
    python benchmarks/recipes_learn.py page OUT.jsonl [--chart FILE.svg]

DATA is a corpus of `flopwise train` (RUN/corpus) whose tokens are below 8,192. Each recipe is fp32 with one lever changed,
or all that `tune` tries first together; every run is a process of its own. A recipe learns as fp32 does if its loss on held-out
text lies within what fp32's own seeds give.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flopwise.advice.bundles import BEST, SAFER
from flopwise.predict.plain_levers import PLAIN
from flopwise.spec.recipe import CHOICES, Recipe
from flopwise.store.training import read_training

SEEDS = 6
MODEL = ["tiny", "--set", "d_model=256,d_ff=704,n_layers=4,n_heads=4,n_kv_heads=4,head_dim=64,vocab=8192"]
SIZES = ["--batch", "8", "--context", "256", "--rate", "1e-3", "--log-every", "20", "--evaluate-every", "100"]
# What a lever needs beside it.
WITH = {
    ("precision", "bf16-master"): {"optimizer": "flopwise"},
    ("attention", "flash"): {"precision": "bf16"},
    ("attention", "sdpa-flash"): {"precision": "bf16"},
    ("attention", "sdpa-cudnn"): {"precision": "bf16"},
}


def cases() -> list[tuple[str, dict[str, str], int]]:
    """A name, levers and a seed."""
    found: list[tuple[str, dict[str, str], int]] = [("fp32", {}, seed) for seed in range(SEEDS)]
    bundles = {"all of tune's first": BEST, "the same, weights in fp32": SAFER, "plain PyTorch's best": PLAIN}
    found += [(name, dict(levers), 0) for name, levers in bundles.items()]
    plain = Recipe()
    for lever, values in CHOICES.items():
        for value in () if lever in ("parallel", "cache") else values:  # one process trains here
            if value != getattr(plain, lever) and value not in ("max-autotune", "cuda"):
                found.append((f"{lever} {value}", {lever: value} | WITH.get((lever, value), {}), 0))
    return found


def measure(data: str, out: Path, steps: int, jobs: int, seconds: float) -> None:
    begun = time.monotonic()
    done = {(row["name"], row["seed"]) for row in rows(out) if "failed" not in row} if out.exists() else set()

    def run(case: tuple[str, dict[str, str], int]) -> dict[str, Any] | None:
        name, levers, seed = case
        left = seconds - (time.monotonic() - begun)
        if left < 5 or (name, seed) in done:
            return None
        options = [word for lever, value in levers.items() for word in (f"--{lever}", value)]
        options += ["--clip", "0"]  # of all alike: what updates in the backward pass cannot clip
        with tempfile.TemporaryDirectory() as runs:
            command = [sys.executable, "-m", "flopwise", "train", *MODEL, *SIZES, "--data", data, "--steps", str(steps)]
            command += ["--seed", str(seed), "-q", "--runs", runs, *options]
            row: dict[str, Any] = {"name": name, "levers": levers, "seed": seed, "steps": steps}
            try:
                ended = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
                if ended.returncode:
                    return row | {"failed": ended.stderr.strip().splitlines()[-2:]}
            except subprocess.TimeoutExpired:
                return row | {"failed": ["cut off"]}
            found = read_training(next(Path(runs).glob("*train*")))
        curve = [(one.step, round(one.loss, 5), one.evaluation) for one in found.steps]
        step_ns = sum(one.wall_ns for one in found.steps[1:]) / max(1, found.last_step - 1)
        return row | {"curve": curve, "held_out": found.steps[-1].evaluation, "step_ms": step_ns / 1e6}

    with ThreadPoolExecutor(jobs) as pool, out.open("a") as file:
        for row in pool.map(run, cases()):
            if row is not None:
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row["name"], row["seed"], row.get("held_out"), row.get("failed", ""), flush=True)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def page(out: Path, chart: Path | None) -> None:
    found = [row for row in rows(out) if "held_out" in row]
    seeds = [row["held_out"] for row in found if row["name"] == "fp32"]
    low, high = min(seeds), max(seeds)
    print(f"fp32, {len(seeds)} seeds: held-out loss {low:.4f} to {high:.4f}\n")
    print("| recipe | held-out loss | within fp32's seeds |\n| :-- | --: | :-- |")
    others = [row for row in found if row["name"] != "fp32"]
    for row in others:
        levers = ", ".join(f"{lever} {value}" for lever, value in row["levers"].items())
        inside = "yes" if low <= row["held_out"] <= high else f"no, {row['held_out'] - high:+.4f}"
        print(f"| {row['name']}{'' if levers == row['name'] else f' ({levers})'} | {row['held_out']:.4f} | {inside} |")
    within = sum(low <= row["held_out"] <= high for row in others)
    print(f"\n{within} of {len(others)} recipes within.")
    for row in rows(out):
        if "failed" in row:
            print(f"- not run: {row['name']}: {' '.join(row['failed'])}")
    if chart is not None:
        draw(found, chart)


def draw(found: list[dict[str, Any]], chart: Path) -> None:
    import altair as alt

    from flopwise.render.charts import save

    values = [
        {
            "step": step,
            "loss": held,
            "of": "fp32, each seed" if row["name"] == "fp32" else "recipes",
            "run": f"{row['name']} {row['seed']}",
        }
        for row in found
        for step, _, held in row["curve"]
        if held is not None
    ]
    lines = (
        alt.Chart(alt.Data(values=values))
        .mark_line(strokeWidth=1.2, opacity=0.7)
        .encode(
            x=alt.X("step:Q"),
            y=alt.Y("loss:Q", title="held-out loss", scale=alt.Scale(type="log", nice=False)),
            color=alt.Color("of:N", title=None, scale=alt.Scale(range=["#D55E00", "#0072B2"])),
            detail="run:N",
        )
    )
    save(lines.properties(width=720, height=320), chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "page"))
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--chart", type=Path)
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.paths[0], Path(asked.paths[1]), asked.steps, asked.jobs, asked.seconds)
    else:
        page(Path(asked.paths[0]), asked.chart)


if __name__ == "__main__":
    main()
