"""The course's questions about memory, asked of this machine's GPU: timelines of 2.7B, and checkpointing strategies.

    python benchmarks/course_memory.py OUT [--only timelines|checkpoint] [--jobs 3]       # on the GPU
    python benchmarks/course_memory.py OUT --draw [--images docs/explanation/images]      # anywhere: charts and tables
    python benchmarks/course_memory.py OUT --size tiny --device cpu --contexts 16,32      # to try it

Timelines: every context, forward and train, fp32 and bf16, as the course writes the model; one recorded step each. Several run
side by side where the prediction says that they fit together into 90 % of the memory: bytes do not depend on neighbours.
OUT/NAME.json gets the figures, OUT/runs the recording, which `--draw` (or `flopwise memory OUT/runs/…`) reads.

Checkpoint: training with fused AdamW and SDPA (so that neither the optimizer's temporaries nor the N × N matrix hide it), a
checkpoint every N blocks, none, and nested ones (nested_checkpoint.py), alone on the GPU: a sweep, whose step that is
not timed tells the peak. OUT/checkpoint.json has the rows; predictions are added by `--draw`, which needs torch and no GPU.

What is there already is not done again. A case that fails is a line. Tables go to OUT/answers.md.
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import flopwise
from flopwise import units
from flopwise.api.memory import capture, stored_report
from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress
from flopwise.predict.prediction import peak_bytes as predicted_peak
from flopwise.records.events import Event, Exited
from flopwise.records.run import OK, Point
from flopwise.snapshot.answers import MemoryReport
from flopwise.spec.sweep import Sweep
from flopwise.spec.workload import Sampling, Trial, Workload, workload

HERE = Path(__file__).resolve().parent
# The course's own code, and a step in which checkpoints show.
COURSE: dict[str, Any] = {"attention": "naive", "norm": "eager", "activation": "eager", "optimizer": "foreach"}
SEGMENTED: dict[str, Any] = {"attention": "sdpa", "norm": "eager", "activation": "eager", "optimizer": "fused"}
SEGMENTS = (0, 1, 2, 4, 6, 8, 16)  # blocks in a checkpoint
NESTED = "nested"
# An fp32 step takes more than a second, and the clocks run it three times for each sample.
SAMPLING = {"fp32": Sampling(warmup=1, samples=1), "bf16": Sampling(warmup=2, samples=2)}
SHARE = 0.9  # of the free memory that neighbours may fill


# Timelines.


def timeline_cases(given: argparse.Namespace) -> dict[str, Workload]:
    """Each case by name; the largest first, so that the small ones fill the gaps."""
    found = {
        f"{given.size}-t{context}-{phase}-{precision}": workload(
            given.size, batch=given.batch, context=int(context), phase=phase, precision=precision, **COURSE
        )
        for phase in ("train", "forward")
        for context in given.contexts.split(",")
        for precision in ("fp32", "bf16")
    }
    return dict(sorted(found.items(), key=lambda case: -predicted_peak(case[1], None)))


class Queue:
    """Cases that wait, and the memory that those under way take."""

    def __init__(self, cases: dict[str, Workload], room_bytes: float) -> None:
        self._waiting = {name: predicted_peak(case, None) for name, case in cases.items()}
        self._taken: dict[str, int] = {}
        self._room, self._changed = room_bytes, threading.Condition()

    def take(self) -> str | None:
        """The first case that fits beside the others; any, if there are no others; None: all are taken."""
        with self._changed:
            while self._waiting:
                left = self._room - sum(self._taken.values())
                name = next((n for n, size in self._waiting.items() if size <= left or not self._taken), None)
                if name is not None:
                    self._taken[name] = self._waiting.pop(name)
                    return name
                self._changed.wait()
            return None

    def give_back(self, name: str) -> None:
        with self._changed:
            self._taken.pop(name, None)
            self._changed.notify_all()


class GivesBack(Progress):
    """Gives a case's memory back as soon as its process is gone: predicting comes after that."""

    def __init__(self, queue: Queue, name: str) -> None:
        self._queue, self._name = queue, name

    def event(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._queue.give_back(self._name)


def record_timelines(given: argparse.Namespace) -> list[str]:
    """Record what is missing, `--jobs` at a time; returns a line for each case that failed."""
    cases = {n: case for n, case in timeline_cases(given).items() if not (given.out / f"{n}.json").exists()}
    if not cases:
        return []
    with Worker() as worker:
        free = worker.look(given.device).free_bytes
    queue, failed = Queue(cases, SHARE * free if free else float("inf")), list[str]()

    def work() -> None:
        with Worker() as worker:
            while (name := queue.take()) is not None:
                begun = time.monotonic()
                try:
                    found = record(name, cases[name], worker, GivesBack(queue, name), given)
                    said = f"peak {units.size(found['peak_bytes'])}, {found['peak_phase']}"
                except flopwise.FlopwiseError as error:
                    failed.append(f"{name}: {error}")
                    said = f"failed: {error}"
                finally:
                    queue.give_back(name)
                print(f"{name} in {time.monotonic() - begun:.0f} s: {said}", file=sys.stderr)

    threads = [threading.Thread(target=work) for _ in range(min(given.jobs, len(cases)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def record(name: str, case: Workload, worker: Worker, progress: GivesBack, given: argparse.Namespace) -> dict[str, Any]:
    """One case: recorded, kept, its figures written down."""
    run = capture(
        case, device=given.device, steps=1, record="python", timeout=300.0, root=given.out / "runs", command="",
        progress=progress, worker=worker,
    )  # fmt: skip
    found = figures(stored_report(run), run.points[0])
    found |= {"run": run.path.name, "stored_bytes": sum(f.stat().st_size for f in run.path.rglob("*") if f.is_file())}
    (given.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def figures(report: MemoryReport, point: Point) -> dict[str, Any]:
    """What a table says of a recording."""
    if report.status != OK or not report.devices:
        raise flopwise.FlopwiseError(f"{report.status}: {report.reason}", report.hint)
    device = report.devices[0]
    peak = device.peak.allocated_bytes
    return {
        "label": report.label,
        "where": report.where,
        "torch": point.environment.torch if point.environment else "",
        "peak_bytes": peak,
        "peak_phase": device.peak.phase,
        "unwatched_peak_bytes": max((m.peak_bytes for m in point.memory), default=None),
        "reserved_bytes": device.peak_reserved_bytes,
        "owners": device.peak.owners,
        "phases": device.phases,
        "kept_bytes": sum(block.blocks * block.bytes for block in device.saved),
        "predictions": [
            {
                "source": one.source,
                "peak_bytes": one.peak.total_bytes,
                "error": one.peak.total_bytes / peak - 1,
                "owners": dict(one.peak.owners),
            }
            for one in report.predictions
        ],
        "largest": msgspec.to_builtins(device.largest[0]),
        "named": msgspec.to_builtins(device.named),
    }


# Checkpoints.


def checkpoint_trials(given: argparse.Namespace) -> dict[str, Trial]:
    """Each strategy by precision and name; the nested one is a step of its own."""
    found = {}
    for precision, sampling in SAMPLING.items():
        cases = {str(n) if n else "off": segmented(given, precision, n) for n in given.segments}
        cases[NESTED] = workload(f"py:nested_checkpoint:{precision}")
        for name, case in cases.items():
            found[f"{precision} {name}"] = Trial(workload=case, sampling=sampling, device=given.device, group=name)
    return found


def segmented(given: argparse.Namespace, precision: str, every: int) -> Workload:
    context = max(map(int, given.contexts.split(",")))
    return workload(
        given.size, batch=given.checkpoint_batch, context=context, phase="train", precision=precision, checkpoint=every,
        **SEGMENTED,
    )  # fmt: skip


def measure_checkpoints(given: argparse.Namespace) -> list[str]:
    """Time every strategy that has no row yet; returns a line for each that failed."""
    path = given.out / "checkpoint.json"
    if path.exists():
        return []
    trials = checkpoint_trials(given)
    run = flopwise.sweep(Sweep(name="checkpoint", trials=tuple(trials.values())), runs=given.out / "runs")
    points = {point.key: point for point in run.points}
    rows, failed = [], []
    for name, trial in trials.items():
        precision, strategy = name.split()
        point = points.get(trial.key())
        if point is None or point.status != OK:
            failed.append(f"checkpoint {name}: {point.status + ': ' + point.reason if point else 'not run'}")
            continue
        rows.append({"precision": precision, "strategy": strategy, **measured(point)})
        print(f"checkpoint {name}: {rows[-1]['step_ms']:.0f} ms", file=sys.stderr)
    if run.complete:
        environment = next((p.environment for p in run.points if p.environment), None)
        where = environment.gpu.name if environment and environment.gpu else "the CPU"
        stored = {"where": where, "run": run.path.name, "rows": rows, "failed": failed}
        path.write_text(json.dumps(stored, indent=1) + "\n")
    return failed


def measured(point: Point) -> dict[str, Any]:
    times = point.times()
    starts = {m.phase: m.start_bytes for m in point.memory}
    return {
        "step_ms": median(times.wall_ns) / 1e6 if times else 0.0,
        "samples": len(times.wall_ns) if times else 0,
        "gpu_ms": median(times.gpu_ns) / 1e6 if times and times.gpu_ns else None,
        "peak_bytes": max((m.peak_bytes for m in point.memory), default=None),
        "peak_phase": max(point.memory, key=lambda m: m.peak_bytes).phase if point.memory else "",
        # When forward begins, the last step's gradients are there; when backward begins, what forward keeps is.
        "kept_less_gradients_bytes": starts["backward"] - starts["forward"] if starts else None,
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=("timelines", "checkpoint"))
    parser.add_argument("--draw", action="store_true", help="charts and tables from what is stored")
    parser.add_argument("--images", type=Path, default=HERE.parent / "docs" / "explanation" / "images")
    parser.add_argument("--jobs", type=int, default=1, help="timelines that are recorded side by side")
    parser.add_argument("--size", default="2.7B")
    parser.add_argument("--contexts", default="128,256,512", help="checkpoints are measured at the largest")
    parser.add_argument("--segments", default=",".join(map(str, SEGMENTS)))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--checkpoint-batch", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu", default="h200", help="with --draw: the GPU that is predicted for")
    given = parser.parse_args()
    given.segments = [int(n) for n in given.segments.split(",")]
    return given


def main() -> None:
    given = options()
    given.out.mkdir(parents=True, exist_ok=True)
    context = max(map(int, given.contexts.split(",")))
    # The worker imports the nested step from here; a factory is given nothing but the device.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    os.environ["COURSE_MEMORY_MODEL"] = f"{given.size} {given.checkpoint_batch} {context}"
    if given.draw:
        from course_memory_pages import draw

        draw(given, timeline_cases(given), {name: trial.workload for name, trial in checkpoint_trials(given).items()})
        return
    begun, failed = time.monotonic(), []
    if given.only != "checkpoint":
        failed += record_timelines(given)
    if given.only != "timelines":
        failed += measure_checkpoints(given)
    print("\n".join([f"{time.monotonic() - begun:.0f} s", *failed]), file=sys.stderr)


if __name__ == "__main__":
    main()
