"""What single levers are predicted to save on steps that nobody here wrote, and what they save: a row for each.

    python benchmarks/lever_savings.py measure FOLDER hf_gpt2:batch=4 vit:batch=32      # on the GPU
    python benchmarks/lever_savings.py measure FOLDER small@8x256                       # flopwise's own, batch x context
    python benchmarks/lever_savings.py table FOLDER                                     # anywhere

Each step of `user_models.py` is measured and traced as it is written, then with each of FIRST; in bf16 and captured in a CUDA
graph with each of THEN. Eager steps that wait for their host differ by a third between processes: a lever is judged where a
step's time is its own. The table predicts each as `tune` does, from the step before it. Met: within 20 % of the saving, or 1 ms.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import msgspec
from user_models import named

from flopwise.advice.gather import inspect
from flopwise.advice.moves import with_levers
from flopwise.advice.predicted import predicted_change
from flopwise.advice.ranking import MoveRanking
from flopwise.capture.isolate import Worker
from flopwise.predict.machine import gpu_of
from flopwise.predict.prediction import record_step
from flopwise.records.events import TraceRequest
from flopwise.records.run import OK, Point
from flopwise.records.written import as_written
from flopwise.spec.workload import Sampling, Trial, Workload, workload

FIRST = [{"precision": "tf32"}, {"optimizer": "fused"}, {"loss": "fused"}, {"precision": "bf16"}]
CAPTURED = {"precision": "bf16", "optimizer": "fused", "graph": "on"}
THEN = [
    {"loss": "fused"},
    {"optimizer": "flopwise"},
    {"norm": "triton"},
    {"compile": "blocks"},
    {"precision": "bf16-master", "optimizer": "flopwise"},
]
# Of flopwise's own models, more, which start with everything written out.
OWN = {"attention": "naive", "norm": "eager", "activation": "eager"}
THEN_OWN = [
    {"attention": "sdpa"},
    {"attention": "flash"},
    {"rope": "triton"},
    {"activation": "triton"},
    {"projections": "fused"},
]
MS = 1e6


class Measured(msgspec.Struct, frozen=True):
    """One point; `levers` are those that `before` (a place in the same file) did not have."""

    point: Point
    levers: dict[str, str] = {}
    before: int = -1


def begun(file: str, step: str) -> Workload:
    """As it is written."""
    if "@" in step:
        name, shape = step.split("@")
        batch, context = map(int, shape.split("x"))
        return workload(name, batch=batch, context=context, **OWN)
    name, arguments = named(step)
    return workload(f"{file}:{name}", set=arguments)


class Study:
    def __init__(self, folder: Path, workers: tuple[Worker, Worker], device: str, seconds: float) -> None:
        self.folder, self.workers, self.device, self.sampling = folder, workers, device, Sampling(seconds=seconds)

    def run(self, work: Workload, trace: str = "") -> Point:
        asked = TraceRequest(path=str((self.folder / trace).resolve()), steps=2) if trace else None
        trial = Trial(workload=work, sampling=self.sampling, device=self.device)
        worker = self.workers["compile" in work.recipe.changed()]
        return worker.run(trial, self.folder / "log", trace=asked, watch=bool(trace))

    def measure(self, file: str, step: str) -> None:
        start = begun(file, step)
        self.rows = self.folder / f"{step.replace(':', '-')}.jsonl"
        self.rows.write_bytes(b"")
        point = self.run(start, f"{step.replace(':', '-')}.kineto.json.gz")
        kept = [self.keep(Measured(point if "@" in step else as_written(point)))]
        self.try_each(kept, 0, FIRST)
        self.try_each(kept, 0, [CAPTURED])
        if kept[-1].levers == CAPTURED:
            self.try_each(kept, len(kept) - 1, THEN + THEN_OWN * ("@" in step))

    def try_each(self, kept: list[Measured], before: int, levers: list[dict[str, str]]) -> None:
        current = kept[before].point.trial.workload
        for one in levers if kept[before].point.status == OK else ():
            changed = with_levers(current, one)
            if changed is not None and changed.recipe != current.recipe:
                kept.append(self.keep(Measured(self.run(changed), one, before)))

    def keep(self, one: Measured) -> Measured:
        with self.rows.open("ab") as rows:
            rows.write(msgspec.json.encode(one) + b"\n")
        return one


def told(path: Path) -> tuple[list[str], list[bool]]:
    """Rows of the table, and whether each prediction was met."""
    kept = [msgspec.json.decode(line, type=Measured) for line in path.read_bytes().splitlines()]
    first = kept[0].point
    gpu = gpu_of(first.environment)
    recorded = None
    if first.trial.workload.own_model is None:
        with Worker() as worker:
            recorded = record_step(worker, first.trial.workload, gpu)
    trace = path.parent / f"{path.stem}.kineto.json.gz"
    rankings = {0: MoveRanking(inspect(first, trace if trace.exists() else None, gpu, recorded).facts)}
    rows, met = [], []
    for one in kept[1:]:
        before = kept[one.before].point
        if one.before not in rankings:
            rankings[one.before] = rankings[0].after(before)
        levers = ", ".join(f"{key} = {value}" for key, value in one.levers.items())
        recipe = before.trial.workload.recipe
        begin = f"| {path.stem} | {recipe.precision}{', captured' if recipe.graph == 'on' else ''} | {levers}"
        if one.point.status != OK:
            rows.append(f"{begin} | | | | | {one.point.status}: {one.point.reason[:90]} |")
            continue
        change = predicted_change(rankings[one.before].facts, one.levers, rankings[one.before].start)
        saved = wall_ms(before) - wall_ms(one.point)
        numbers = f"{wall_ms(before):.2f} | {wall_ms(one.point):.2f}"
        if change is None:
            rows.append(f"{begin} | {numbers} | | {saved:.2f} | no prediction |")
            continue
        saving = change.saving_ns / MS
        met.append(abs(saving - saved) <= max(1.0, 0.2 * abs(saved)))
        rows.append(f"{begin} | {numbers} | {saving:.2f} | {saved:.2f} | {'yes' if met[-1] else 'no'} |")
    return rows, met


def wall_ms(point: Point) -> float:
    times = point.times()
    assert times is not None
    return median(times.wall_ns) / MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", nargs="*", metavar="NAME[:ARGUMENT=NUMBER,…]")
    parser.add_argument("--file", default="benchmarks/user_models.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.what == "measure":
        with Worker() as worker, Worker(compiler=True) as compiling:
            study = Study(asked.folder, (worker, compiling), asked.device, asked.seconds)
            for step in asked.steps:
                began = time.monotonic()
                study.measure(asked.file, step)
                print(f"{step}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        return
    print("| step | from | lever | before, ms | with it | predicted saving | measured | met |")
    print("| :-- | :-- | :-- | --: | --: | --: | --: | :-- |")
    good: list[bool] = []
    for path in sorted(asked.folder.glob("*.jsonl")):
        rows, met = told(path)
        print("\n".join(rows), flush=True)
        good += met
    print(f"\nWithin 20 % or 1 ms: {sum(good)} of {len(good)}.")


if __name__ == "__main__":
    main()
