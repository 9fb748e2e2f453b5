"""Large stores: CPU seconds of the verbs over 1,000 runs, two of them of 5,000 points each.

    python benchmarks/attack/large_stores.py [VERB ...] [--points 5000] [--runs 1000]

The store is generated: a sweep of four phases with 20 samples by three clocks, twice, and runs of one point. Each verb is a
process of its own; its CPU seconds are user + system, interpreter start included. Each is asked of a small store first: the
modules are then compiled, as pip leaves them.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from flopwise.records.run import OK, Environment, Gpu, PhaseMemory, PhaseTimes, Point, Ran
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run

PHASES = {"step": 1.0, "forward": 0.3, "backward": 0.6, "optimizer": 0.1}
GPU = Gpu(name="NVIDIA H200", memory_bytes=150 << 30, sm_count=132, l2_bytes=60 << 20, capability="9.0", driver="570")


def times(phase: str, ns: float, chance: random.Random) -> PhaseTimes:
    wall, gpu = (tuple(round(ns * share * chance.gauss(1, 0.01)) for _ in range(20)) for share in (1.0, 0.99))
    return PhaseTimes(phase=phase, wall_ns=wall, gpu_ns=gpu, launch_ns=(round(ns / 5),) * 20, gpu_held=(True,) * 20)


def point(trial: Trial, chance: random.Random) -> Point:
    ns = 1e6 * trial.workload.batch * trial.workload.context / 16
    sizes = {"start_bytes": 1 << 30, "peak_bytes": 2 << 30, "end_bytes": 1 << 30, "reserved_bytes": 3 << 30}
    return Point(
        key=trial.key(),
        trial=trial,
        status=OK,
        phases=tuple(times(phase, ns * share, chance) for phase, share in PHASES.items()),
        memory=tuple(PhaseMemory(phase=phase, **sizes) for phase in PHASES),
        environment=Environment(flopwise="1", python="3.12", torch="2.9", gpu=GPU),
        ran=Ran(device="cuda", parameters=10**8, weights="fp32", compute="bf16"),
    )


def trials(count: int) -> list[Trial]:
    shapes = [(n % 100 + 1, 16 * (n // 100 + 1)) for n in range(count)]
    works = (workload("small", batch=batch, context=context) for batch, context in shapes)
    return [Trial(workload=work, device="cuda", sampling=Sampling(samples=20)) for work in works]


def stored(root: Path, kind: str, planned: list[Trial], seed: int) -> str:
    chance = random.Random(seed)
    with Run.create(root, kind, "large", f"flopwise {kind}", planned) as run:
        for trial in planned:
            run.append(point(trial, chance))
    return run.id


def verbs(root: Path, points: int, runs: int) -> dict[str, list[str]]:
    """A store at this place, and what is asked of it."""
    a, b = (stored(root, "sweep", trials(points), seed) for seed in (1, 2))
    for seed in range(runs):
        stored(root, "bench", trials(1), seed)
    asked = {
        "runs": ["runs"],
        "show": ["runs", "show", a],
        "compare": ["compare", a, b],
        "md": ["report", a, "-o", f"{root}/page.md"],
        "html": ["report", a, "-o", f"{root}/page.html"],
    }
    return {name: [*words, "--runs", str(root)] for name, words in asked.items()}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("verb", nargs="*")
    asked.add_argument("--points", type=int, default=5000)
    asked.add_argument("--runs", type=int, default=1000)
    given = asked.parse_args()
    os.fsync = lambda fd: None  # the disk is not what is measured
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PYTHONPYCACHEPREFIX": f"{folder}/compiled", "PYTHONDONTWRITEBYTECODE": ""}
        small, large = verbs(Path(folder, "small"), 3, 1), verbs(Path(folder, "large"), given.points, given.runs)
        for name in given.verb or large:
            for words in (small[name], large[name]):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                command = [sys.executable, "-m", "flopwise", *words]
                subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=env)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{name}: {seconds:.1f} CPU-s", flush=True)


if __name__ == "__main__":
    main()
