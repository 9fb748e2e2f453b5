"""Steps of different kind, each timed, then traced: pairs for `untraced_steps.py`, and what a trace alone says of each step.

    python benchmarks/untraced_pairs.py FOLDER [--nsys]       # on the GPU; about five minutes, eight with nsys

Kineto traces each step three times: with shapes, without, and with Python stacks. A pair is a small file (`*.npz`): the host's
timeline and four times; the trace itself is not kept. `pairs.csv` has the estimate beside the measured step, whether the trace
alone is called launch-bound, and the GPU's share of the measured step.
"""

import argparse
import contextlib
import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median

import numpy as np
from untraced_steps import of_file

from flopwise.api.explain import explain
from flopwise.capture.isolate import Worker
from flopwise.capture.nsys import SUFFIX, trace_with_nsys
from flopwise.capture.nsys_program import find_nsys
from flopwise.records.events import TraceRequest
from flopwise.records.run import OK, Point
from flopwise.spec.workload import Sampling, Trial, Workload, workload

USER = "benchmarks/user_models.py"
FAST = {"precision": "bf16", "optimizer": "fused", "attention": "sdpa"}
# What sets the pace: the host, the GPU, or either by a hair; eager, compiled and captured.
STEPS: dict[str, tuple[str, dict[str, object]]] = {
    "tiny": ("tiny", {}),
    "small-naive": ("small", {"attention": "naive", "norm": "eager", "activation": "eager"}),
    "small-forward": ("small", {"phase": "forward", "batch": 1, **FAST}),
    "small-bf16": ("small", {"context": 512, **FAST}),
    "small-bf16-long": ("small", {"context": 2048, **FAST}),
    "small-compiled": ("small", {"compile": "default", **FAST}),
    "small-graph": ("small", {"graph": "on", **FAST}),
    "medium-bf16": ("medium", {"context": 1024, "batch": 8, **FAST}),
    "large-fp32": ("large", {}),
    "gpt2": (f"{USER}:hf_gpt2", {}),
    "encoder": (f"{USER}:encoder", {}),
    "vit": (f"{USER}:vit", {}),
    "single-file": (f"{USER}:single_file_gpt", {}),
}
KINETO = {"shapes": {"shapes": True}, "bare": {"shapes": False, "modules": False}, "stacks": {"stacks": True}}
BY_NSYS = ("tiny", "small-naive", "small-bf16", "small-compiled", "small-graph", "medium-bf16", "gpt2", "encoder")
COLUMNS = ("pair", "profiler", "traced_ms", "gpu_busy_ms", "untraced_ms", "estimate_ms", "low_ms", "high_ms")
SAID = ("called_launch_bound", "gpu_share_of_untraced")


def wall_ns(point: Point) -> float:
    times = point.times()
    assert times is not None
    return float(median(times.wall_ns))


def captured(
    step: str, work: Workload, workers: tuple[Worker, Worker], folder: Path
) -> Iterator[tuple[str, Path, Point]]:
    """Each kind of trace of one step beside its point; a file is gone when the next is asked for."""
    trial = Trial(workload=work, sampling=Sampling(seconds=0.6), device="cuda")
    for kind, options in KINETO.items():
        path = folder / f"{step}-{kind}.kineto.json.gz"
        asked = TraceRequest(path=str(path.resolve()), steps=2, **options)
        point = workers["compile" in work.recipe.changed()].run(trial, folder / "log", trace=asked)
        if point.status != OK:
            print(f"{step}: {point.status}: {point.reason}", file=sys.stderr)
            return
        yield kind, path, point
        path.unlink(missing_ok=True)


def by_nsys(step: str, work: Workload, worker: Worker, folder: Path) -> Iterator[tuple[str, Path, Point]]:
    trial = Trial(workload=work, sampling=Sampling(seconds=0.6), device="cuda")
    point = worker.run(trial, folder / "log")
    request = TraceRequest(path=str((folder / f"{step}{SUFFIX}").resolve()), steps=2)
    written, ended = trace_with_nsys(find_nsys(), trial, request, folder / "log.nsys", 120.0)
    if written is None or point.status != OK:
        print(f"{step}, nsys: {ended.status}: {ended.reason}", file=sys.stderr)
        return
    yield "nsys", Path(written.path), point
    Path(written.path).unlink(missing_ok=True)


def keep(folder: Path, name: str, path: Path, point: Point) -> list[object]:
    """The pair as a file, and its row."""
    pair = of_file(path, wall_ns(point), name)
    host = {f"host_{key}": value for key, value in asdict(pair.host).items()}
    times = {"traced_ns": pair.traced_ns, "busy_ns": pair.busy_ns, "untraced_ns": pair.untraced_ns, "n": pair.n}
    np.savez_compressed(folder / f"{name}.npz", profiler=pair.profiler, **times, **host)
    said = explain(path)
    estimate = getattr(said, "untraced_step", None)
    found = [estimate.ns, estimate.low_ns, estimate.high_ns] if estimate is not None else [pair.traced_ns] * 3
    ms = [round(ns / 1e6, 3) for ns in (pair.traced_ns, pair.busy_ns, pair.untraced_ns, *found)]
    called = any("launch-bound" in one.title for one in said.findings or ())
    return [name, pair.profiler, *ms, called, round(pair.busy_ns / pair.untraced_ns, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nsys", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(STEPS), choices=STEPS)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        table = csv.writer(stack.enter_context((asked.folder / "pairs.csv").open("w", newline="", buffering=1)))
        table.writerow((*COLUMNS, *SAID))
        workers = stack.enter_context(Worker()), stack.enter_context(Worker(compiler=True))
        for step in asked.only:
            target, options = STEPS[step]
            work = workload(target, **options)
            traced = [captured(step, work, workers, asked.folder)]
            if asked.nsys and step in BY_NSYS:
                traced.append(by_nsys(step, work, workers["compile" in work.recipe.changed()], asked.folder))
            for kind, path, point in chain(*traced):
                table.writerow(keep(asked.folder, f"{step}-{kind}", path, point))
            print(step, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
