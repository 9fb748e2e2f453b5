"""A launch-bound step without and with CUDA graphs: what fewer ops, compiling and graphs by the compiler gain, in turns.

    python benchmarks/host_levers.py small:4x512 llama3.2-1b:4x1024 [--kinds off,reduce-overhead] [--rounds 3] [-o DIR]

Every kind is measured once a round, each time in a process of its own; the time is the median of the rounds' medians, and the
range that of the rounds. Predictions are by the ceilings that this machine has.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from flopwise.analysis.clocks import summarise
from flopwise.api.bench import bench
from flopwise.errors import FlopwiseError
from flopwise.predict.machine import gpu_of, machine_with
from flopwise.predict.prediction import predict
from flopwise.records.run import Point

KINDS: dict[str, dict[str, str]] = {
    "off": {},
    "fewer-ops": {
        "optimizer": "flopwise",
        "projections": "fused",
        "norm": "triton",
        "activation": "triton",
        "rope": "triton",
    },
    "blocks": {"compile": "blocks"},
    "whole": {"compile": "default"},
    "reduce-overhead": {"compile": "reduce-overhead"},
    "graph": {"graph": "on"},
    "whole+graph": {"compile": "default", "graph": "on"},
}


def measured(size: str, batch: int, context: int, levers: dict[str, str], seconds: float, device: str) -> Point:
    """One process of it."""
    with TemporaryDirectory() as runs:
        sampling = {"processes": 1, "seconds": seconds, "device": device, "runs": runs}
        return bench(size, batch=batch, context=context, **sampling, **levers).points[0]


def row(kind: str, points: list[Point]) -> dict[str, object]:
    """Milliseconds: of the step, its range, the host's launches, the prediction; the peak in GiB."""
    steps = [summarise(point)[0] for point in points]
    walls = [step.wall.median / 1e6 for step in steps]
    launches = [step.launch.median / 1e6 for step in steps if step.launch is not None]
    gpu, peaks = gpu_of(points[0].environment), [one.peak_bytes / 2**30 for one in points[0].memory]
    time = predict(points[0].trial.workload, machine_with(gpu)).time if gpu is not None else None
    return {
        "kind": kind,
        "ms": statistics.median(walls),
        "low": min(walls),
        "high": max(walls),
        "rounds": walls,
        "launch_ms": statistics.median(launches) if launches else None,
        "predicted_ms": time.wall_ns / 1e6 if time is not None else None,
        "peak_gib": max(peaks, default=None),
    }


def line(step: str, found: dict[str, object]) -> str:
    shown = [
        "-" if (value := found[name]) is None else f"{value:.2f}" for name in ("launch_ms", "predicted_ms", "peak_gib")
    ]
    spread = f"{found['low']:.2f}-{found['high']:.2f}"
    return f"| {step} | {found['kind']} | {found['ms']:.2f} ms | {spread} | {' | '.join(shown)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="SIZE:BATCHxCONTEXT")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--set", nargs="*", default=["precision=bf16", "optimizer=fused"], metavar="LEVER=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("-o", type=Path, metavar="DIR")
    given = parser.parse_args()
    base, every = dict(one.split("=") for one in given.set), {}
    print("| step | kind | median | rounds | launches ms | predicted ms | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for step in given.steps:
        size, shape = step.split(":")
        batch, context = map(int, shape.split("x"))
        points: dict[str, list[Point]] = {}
        failed: set[str] = set()
        for _ in range(given.rounds):
            for kind in (one for one in given.kinds.split(",") if one not in failed):
                try:
                    levers = base | KINDS[kind]
                    point = measured(size, batch, context, levers, given.seconds, given.device)
                    points.setdefault(kind, []).append(point)
                    print(f"{step} {kind}: {summarise(point)[0].wall.median / 1e6:.2f} ms", file=sys.stderr, flush=True)
                except FlopwiseError as error:
                    failed.add(kind)
                    print(f"| {step} | {kind} | {error.message} |", flush=True)
        every[step] = [row(kind, some) for kind, some in points.items()]
        for found in every[step]:
            print(line(step, found), flush=True)
        if given.o is not None:
            given.o.mkdir(parents=True, exist_ok=True)
            (given.o / "host_levers.json").write_text(json.dumps({"base": base, "steps": every}, indent=1))


if __name__ == "__main__":
    main()
