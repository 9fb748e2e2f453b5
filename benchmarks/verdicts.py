"""How often the verdict is wrong, and how often it is found: same against same, and against known differences, for real.

    python benchmarks/verdicts.py same --device cpu -n 100 --seconds 2 -o …/same-cpu-quiet.jsonl
    python benchmarks/verdicts.py same --device cpu -n 100 --seconds 2 --busy 2 -o …/same-cpu-busy.jsonl
    python benchmarks/verdicts.py known --device cuda -n 12 -o …/known-h200.jsonl

Every line is one verdict as `flopwise bench --versus` gives it: the same pairs of processes, the same rule.
`python benchmarks/verdicts.py table FILE…` counts them.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from process_study import busy_loops

from flopwise.advice import moves
from flopwise.analysis.matching import compare_clocks
from flopwise.api.tune import tune
from flopwise.capture.interleave import Contest
from flopwise.capture.stopping import PairsRule
from flopwise.records.comparison import FASTER, SLOWER
from flopwise.spec.workload import Sampling, Trial, Workload, workload

BF16 = {"precision": "bf16"}
SAME = {
    "cpu": {
        "small step": ("tiny", {"batch": 1, "context": 32, "phase": "forward"}),
        "training step": ("tiny", {"batch": 2, "context": 32}),
    },
    "cuda": {
        "launch-bound": ("small", BF16),
        "captured": ("small", {**BF16, "graph": "on", "optimizer": "fused"}),
        "GPU-bound": ("medium", {**BF16, "batch": 8, "context": 1024, "phase": "forward"}),
        "compiled": ("tiny", {**BF16, "compile": "default", "phase": "forward"}),
    },
}
KNOWN = {"cpu": ("host",), "cuda": ("host", "captured", "gpu")}


def judged(contest: Contest, pair: tuple[Workload, Workload], device: str, seconds: float) -> dict[str, object]:
    """One verdict, with those of the other clocks, and what it cost."""
    began = time.monotonic()
    sampling = Sampling(seconds=seconds)
    a, b = (Trial(workload=w, sampling=sampling, device=device, group=g) for w, g in zip(pair, "ab", strict=True))
    result = contest.run((a, b), PairsRule(sampling))
    if result.failed is not None:
        sys.exit(f"{result.failed.trial.workload.label()}: {result.failed.reason}")
    clocks = {
        clock: {"ratio": c.ratio, "low": c.low, "high": c.high, "verdict": c.verdict, "spread": c.spread}
        for clock, c in compare_clocks(*result.points).items()
    }
    times = result.points[0].times()
    counted = {"pairs": len(times.processes) if times else 0, "stopped": result.stopped}
    return counted | {"seconds": round(time.monotonic() - began, 2)} | clocks


def measure(given: argparse.Namespace) -> None:
    """Verdicts in random order of the steps; the two are swapped by chance."""
    rng = random.Random(given.seed)
    if given.what == "same":
        made = {name: (workload(target, **options),) * 2 for name, (target, options) in SAME[given.device].items()}
        made |= {f"{kind} pieces": (workload(f"py:known_steps:{kind}"),) * 2 for kind in KNOWN[given.device]}
    else:
        made = {
            f"{kind} +{more} %": (workload(f"py:known_steps:{kind}"), workload(f"py:known_steps:{kind}_{more}"))
            for kind in KNOWN[given.device]
            for more in (1, 3, 10)
        }
    made = {name: pair for name, pair in made.items() if not given.steps or name in given.steps.split(",")}
    contest, began = Contest(lambda key: None), time.monotonic()
    with given.output.open("a") as out, busy_loops(given.busy):
        try:
            for n in range(given.n):
                for name, pair in made.items():
                    if time.monotonic() - began > given.budget:
                        return
                    swapped = rng.random() < 0.5
                    contest.random.seed(rng.random())
                    row = judged(contest, pair[::-1] if swapped else pair, given.device, given.seconds)
                    known = {
                        "step": name,
                        "known": given.what == "known",
                        "n": n,
                        "swapped": swapped,
                        "busy": given.busy,
                        "device": given.device,
                    }
                    out.write(json.dumps(known | row) + "\n")
                    out.flush()
        finally:
            contest.close()


def tunings(given: argparse.Namespace) -> None:
    """Runs of `tune` whose levers change nothing: of a forward pass, the optimizer and the loss."""
    moves.TRIED = {"optimizer": ("adamw-loop", "foreach", "fused"), "loss": ("chunked",), "overlap": ("on",)}
    moves.GPU_ONLY = {}
    options = SAME[given.device]["small step" if given.device == "cpu" else "launch-bound"][1] | {"phase": "forward"}
    with given.output.open("a") as out, busy_loops(given.busy), tempfile.TemporaryDirectory() as runs:
        for n in range(given.n):
            model = "tiny" if given.device == "cpu" else "small"
            found = tune(model, device=given.device, seconds=given.seconds, runs=runs, **options)
            row = {
                "n": n,
                "seconds": round(found.ended.seconds if found.ended else 0.0, 1),
                "attempts": [
                    {
                        "lever": one.name,
                        "kept": one.kept,
                        "why": one.why,
                        "ratio": one.comparison and one.comparison.ratio,
                    }
                    for one in found.attempts
                ],
            }
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"tune {n}: {sum(a.kept for a in found.attempts)} of {len(found.attempts)} kept, {row['seconds']} s")


def table(files: list[Path]) -> None:
    """Of every step: how many verdicts each way, the pairs and seconds they took."""
    rows = defaultdict(list)
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rows[row["device"], "busy" if row["busy"] else "quiet", row["step"]].append(row)
    names = (
        "device, machine, step, verdicts, B faster (known: wrong), B slower (known: right), none, open, pairs, seconds"
    )
    heading = [*names.split(", "), "GPU clock differs"]
    print("| " + " | ".join(heading) + " |\n" + "|---" * len(heading) + "|")
    for (device, machine, step), found in rows.items():
        words = [row["wall"]["verdict"] for row in found]
        sides = [sum(word == side for word in words) for side in (FASTER, SLOWER)]
        if found[0].get("known"):  # B has more to do; where the two were swapped, A has
            right = [word == (FASTER if row["swapped"] else SLOWER) for word, row in zip(words, found, strict=True)]
            sides = [sum(sides) - sum(right), sum(right)]
        none, still = words.count("no difference shown"), words.count("inconclusive")
        pairs, seconds = (sorted(row[key] for row in found)[len(found) // 2] for key in ("pairs", "seconds"))
        gpu = sum(row.get("gpu", {}).get("verdict") in (FASTER, SLOWER) for row in found)
        counts = (len(found), *sides, none, still, pairs, f"{seconds:.1f}", gpu)
        print("| " + " | ".join(map(str, (device, machine, step, *counts))) + " |")


def main() -> None:
    """Measure, or count what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("same", "known", "tune", "table"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--steps", default="")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--budget", type=float, default=86_400.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if given.what == "table":
        table(given.files)
    else:
        (tunings if given.what == "tune" else measure)(given)


if __name__ == "__main__":
    main()
