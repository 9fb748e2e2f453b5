"""Measures the cases that benchmarks/prediction.py judges: fixed before any was looked at, on this machine's GPU.

    python benchmarks/prediction_cases.py RUNS [--sizes small,…] [--contexts 128,…] [--seconds 300]
    python benchmarks/prediction_cases.py RUNS --held-out --seconds 200
    python benchmarks/prediction_cases.py RUNS --memory --without STORED… --seconds 100
    python benchmarks/prediction.py --time RUNS/…-prediction-…

The levers at the sizes where they matter, compiled steps and CUDA graphs among them; then five sizes × three contexts ×
fp32 and bf16 × inference and training × naive and fused attention. All in one process, one after the other, with the
allocator and cuBLAS's workspaces emptied between them, so that the whole takes minutes. What cannot run is a point that
says why. `--seconds` ends it in time: what is measured by then is kept.

`--held-out`: other batches and contexts than those, which the model of the machine was looked at with. Every third of their
grid, the sizes in turn, so that whatever is measured by the end of the time is spread over all; after three rounds of the sizes
come levers and two compiled steps, then the rest.

`--memory`: only what the peak needs, one step of warm-up and one that counts, of the grid alone, the cheapest first.
`--without`: cases that stored runs have are left out.
"""

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from flopwise.capture.point_builder import PointBuilder
from flopwise.capture.trials import run_trial
from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.records.run import OK, Point
from flopwise.spec.gpu import find_gpu
from flopwise.spec.workload import Sampling, Trial, Workload, workload
from flopwise.store import StoredRun
from flopwise.store.run import Run

SIZES = ("small", "medium", "large", "xl", "2.7B")
PRECISIONS, PHASES = ("bf16", "fp32"), ("forward", "train")
BY_HAND = {"attention": "naive", "norm": "eager", "activation": "eager"}
LEVERS = (
    {"precision": "bf16", "optimizer": "fused", "graph": "on"},
    {"precision": "bf16", "loss": "chunked"},
    {"precision": "bf16", "checkpoint": 1},
    {"precision": "bf16", "checkpoint": 4},
    {"precision": "fp16", "optimizer": "fused"},
    {"precision": "bf16-pure", "optimizer": "fused"},
    {"precision": "tf32"},
    {"precision": "bf16", "optimizer": "fused", "compile": "default"},
)

UNSEEN = ((2, 768), (8, 256))  # batch, context
UNSEEN_LEVERS = (
    ("small", {"precision": "bf16", "optimizer": "fused", "graph": "on"}),
    ("medium", {"precision": "bf16", "checkpoint": 1}),
    ("medium", {"precision": "tf32"}),
    ("medium", {"precision": "bf16-pure", "optimizer": "fused"}),
    ("small", {"precision": "fp16", "optimizer": "fused"}),
    ("small", {"precision": "bf16", "optimizer": "fused", "compile": "default"}),
    ("medium", {"precision": "bf16", "optimizer": "fused", "compile": "default"}),
)


def held_out(sizes: tuple[str, ...]) -> Iterator[Workload]:
    """Every third of a grid of shapes that `cases` has not, the sizes in turn; after the first rounds of it the levers."""
    attentions = (BY_HAND, {"attention": "sdpa"})
    each = [list(itertools.product((size,), UNSEEN, PRECISIONS, PHASES, attentions)) for size in sizes]
    thirds = [some[(-len(some) * n) % 3 :: 3] for n, some in enumerate(each)]  # of all of them in a row
    rounds = [one for some in itertools.zip_longest(*thirds) for one in some if one is not None]
    grid = [
        workload(size, batch=batch, context=context, precision=precision, phase=phase, **by)
        for size, (batch, context), precision, phase, by in rounds
    ]
    batch, context = UNSEEN[-1]
    levers = [workload(s, batch=batch, context=context, phase="train", **by) for s, by in UNSEEN_LEVERS if s in sizes]
    first = 3 * len(sizes)
    yield from (*grid[:first], *levers, *grid[first:])


def cases(sizes: tuple[str, ...], contexts: tuple[int, ...]) -> Iterator[Workload]:
    """The levers, then the grid."""
    for levers in LEVERS:
        for size in dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])):
            yield workload(size, context=contexts[len(contexts) // 2], phase="train", **levers)
    grid = itertools.product(contexts, sizes, PRECISIONS, PHASES, (BY_HAND, {"attention": "sdpa"}))
    for context, size, precision, phase, by in grid:
        yield workload(size, context=context, precision=precision, phase=phase, **by)


def trial(case: Workload, device: str) -> Trial:
    """Few samples where a step is long, 0.3 s of warm-up where it is short: settled by the prediction, before it is run."""
    gpu = find_gpu("h200")
    assert gpu is not None
    wall_ns = predict(case, Machine(gpu=gpu)).time_with(from_datasheet(gpu)).wall_ns
    warmup, samples = min(20, max(2, round(3e8 / wall_ns))), min(10, max(2, round(1e9 / wall_ns)))
    return Trial(workload=case, sampling=Sampling(warmup=warmup, samples=samples), device=device)


def grid_by_cost(sizes: tuple[str, ...], contexts: tuple[int, ...], known: set[str]) -> list[Trial]:
    """The grid's cases that are not known, with as few steps as there can be."""
    found = [case for case in cases(sizes, contexts) if not set(case.recipe.changed()) - {"precision", *BY_HAND}]
    gpu, few = find_gpu("h200"), Sampling(warmup=1, samples=1)
    found = [c for c in found if c.recipe.precision in PRECISIONS and c.label() not in known]
    found.sort(key=lambda case: sum(op.flops for op in predict(case, Machine(gpu=gpu)).ops))
    return [Trial(workload=case, sampling=few, device="auto") for case in found]


def stored_labels(paths: list[Path]) -> set[str]:
    points = (point for path in paths for point in StoredRun.load(path).points)
    return {point.trial.workload.label() for point in points if point.status == OK and point.memory}


def measured(one: Trial) -> Point:
    """One trial in this process; nothing of it stays."""
    builder = PointBuilder(one)
    try:
        run_trial(one, builder.take, lambda: True)
    except Exception as error:  # noqa: BLE001  (the point says what it was)
        print(f"  {type(error).__name__}: {error}"[:200], file=sys.stderr)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    assert builder.done is not None
    return builder.finish(builder.done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--contexts", default="128,512,1024")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--held-out", action="store_true", help="shapes that the others have not, spread over the sizes"
    )
    parser.add_argument("--memory", action="store_true", help="the grid alone, with as few steps as there can be")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="stored runs whose cases are left out")
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    contexts = tuple(int(context) for context in given.contexts.split(","))
    sizes = tuple(given.sizes.split(","))
    trials = (
        grid_by_cost(sizes, contexts, stored_labels(given.without))
        if given.memory
        else [trial(case, given.device) for case in (held_out(sizes) if given.held_out else cases(sizes, contexts))]
    )
    begun = time.monotonic()
    with Run.create(given.runs, "bench", "prediction", " ".join(sys.argv), trials) as run:
        for n, one in enumerate(trials, 1):
            if time.monotonic() - begun > given.seconds:
                print(f"the time is up: {n - 1} of {len(trials)} measured", file=sys.stderr)
                break
            point = measured(one)
            run.append(point)
            print(
                f"[{n}/{len(trials)}] {time.monotonic() - begun:4.0f} s {one.workload.label()} {point.status}",
                file=sys.stderr,
            )
    print(run.path)


if __name__ == "__main__":
    main()
