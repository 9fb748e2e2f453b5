"""How much two processes of the same step differ, and why: many alive at once, each round runs all of them in random order.

    python benchmarks/process_study.py --device cpu -o benchmarks/results/verdicts-2026-11/processes-cpu-quiet.jsonl
    python benchmarks/process_study.py --device cpu --busy 2 -o …/processes-cpu-busy.jsonl
    python benchmarks/process_study.py --device cuda -o …/processes-h200.jsonl

Each treatment takes one cause away: `pinned` puts every process on the same core, `fixed` gives all of them the same memory
layout (no address space randomisation). `python benchmarks/process_study.py --read FILE… -o CHART.svg` draws the processes
and prints, for every step and clock, how far samples, rounds, positions and processes lie apart.
"""

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from flopwise.capture.interleave import InterleavedTrial
from flopwise.capture.isolate import Worker
from flopwise.records.events import Event, Started
from flopwise.records.run import STEP
from flopwise.spec.workload import Sampling, Trial, workload

ADDR_NO_RANDOMIZE = 0x0040000
STEPS = {
    "cpu": {"small step": ("tiny", {"batch": 1, "context": 32, "phase": "forward"}), "larger step": ("tiny", {})},
    "cuda": {
        "launch-bound": ("small", {"precision": "bf16"}),
        "captured": ("small", {"precision": "bf16", "graph": "on", "optimizer": "fused"}),
        "GPU-bound": ("medium", {"precision": "bf16", "batch": 8, "context": 1024, "phase": "forward"}),
    },
}


@contextmanager
def busy_loops(n: int) -> Iterator[None]:
    """So many processes that do nothing but use a core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def measure(trial: Trial, processes: int, rounds: int, treatment: str) -> Iterator[dict[str, object]]:
    """The samples of every process in every round, with its position in the round."""
    libc = ctypes.CDLL(None)
    libc.personality(ADDR_NO_RANDOMIZE if treatment == "fixed" else 0)
    core = sorted(os.sched_getaffinity(0))[-1]

    def pin(event: Event) -> None:
        if treatment == "pinned" and isinstance(event, Started):
            os.sched_setaffinity(event.pid, {core})

    with ExitStack() as stack:
        alive, workers = [], [stack.enter_context(Worker(wait=False)) for _ in range(processes)]
        for worker in workers:
            one = InterleavedTrial(trial, on_event=pin, worker=worker)
            if not one.prepare():
                raise SystemExit(f"{trial.workload.label()}: {one.ended.reason}")
            alive.append(one)
        libc.personality(0)
        order = list(range(processes))
        for n in range(rounds):
            random.shuffle(order)
            for position, process in enumerate(order):
                alive[process].round()
                sample = alive[process].builder.samples[-1][STEP]
                yield {
                    "round": n,
                    "position": position,
                    "process": process,
                    "wall_ns": sample.wall_ns,
                    "launch_ns": sample.launch_ns,
                    "gpu_ns": sample.gpu_ns,
                }


def read(files: list[Path], chart: Path) -> None:
    """The table of spreads, and a chart with a dot for every process."""
    groups: dict[tuple[str, ...], list[dict[str, float]]] = defaultdict(list)
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            machine = file.stem.removeprefix("processes-").replace("-", " ")
            groups[machine, row["step"], row["treatment"]].append(row)
    print("| machine | step | treatment | clock | level, ms | within | drift | position | processes | by chance |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    dots = []
    for key, rows in groups.items():
        for clock in ("wall", "launch", "gpu"):
            if rows[0].get(f"{clock}_ns"):
                level, spreads, of_process = _spreads(rows, f"{clock}_ns")
                shown = [f"{100 * one:.2f} %" for one in spreads]
                print("| " + " | ".join((*key, clock, f"{level / 1e6:.2f}", *shown)) + " |")
                if clock == "wall":
                    name = f"{key[0]}: {key[1]}, {key[2]}"
                    dots += [{"step": name, "percent": 100 * one, "treatment": key[2]} for one in of_process]
    _draw(dots, chart)


def _spreads(rows: list[dict[str, float]], clock: str) -> tuple[float, tuple[float, ...], np.ndarray]:
    """The level; the spread of samples, of rounds, of positions, of processes, and what samples alone make of the last."""
    size = [int(max(row[name] for row in rows)) + 1 for name in ("round", "process")]
    logs, position = np.zeros(size), np.zeros(size, dtype=int)
    for row in rows:
        at = int(row["round"]), int(row["process"])
        logs[at], position[at] = np.log(row[clock]), row["position"]
    rounds = np.median(logs, axis=1, keepdims=True)
    processes = np.median(logs - rounds, axis=0)
    left = logs - rounds - processes
    positions = [np.median(left[position == n]) for n in range(size[1])]
    within = _robust(left)
    chance = 1.2533 * within / np.sqrt(size[0])  # of a median
    spreads = within, _robust(rounds), float(np.std(positions)), float(np.std(processes, ddof=1)), float(chance)
    return float(np.exp(np.median(logs))), spreads, processes - processes.mean()


def _robust(x: np.ndarray) -> float:
    return 1.4826 * float(np.median(np.abs(x - np.median(x))))


def _draw(dots: list[dict[str, object]], chart: Path) -> None:
    from flopwise.render.charts import altair, save

    alt = altair()
    title = "a process's median, % from the mean of all"
    drawn = (
        alt.Chart(alt.Data(values=dots))
        .mark_circle(size=60, opacity=0.75)
        .encode(
            x=alt.X("percent:Q", title=title),
            y=alt.Y("step:N", sort=None, title=None, axis=alt.Axis(labelLimit=320)),
            color=alt.Color("treatment:N", legend=None),
        )
        .properties(width=480)
    )
    save(drawn, chart)


def main() -> None:
    """Every step under every treatment; one line for each sample."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", type=Path, nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--treatments", default="plain,pinned,fixed")
    parser.add_argument("--steps", default="")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    if given.read:
        read(given.read, given.output)
        return
    random.seed(0)
    steps = {name: step for name, step in STEPS[given.device].items() if name in (given.steps or name)}
    with given.output.open("w") as out, busy_loops(given.busy):
        for name, (target, options) in steps.items():
            for treatment in given.treatments.split(","):
                began = time.monotonic()
                trial = Trial(workload=workload(target, **options), sampling=Sampling(seconds=1.0), device=given.device)
                for row in measure(trial, given.processes, given.rounds, treatment):
                    known = {"step": name, "treatment": treatment, "busy": given.busy}
                    out.write(json.dumps(known | row) + "\n")
                print(f"{name}, {treatment}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
