"""One trial in several processes, one after the other: what two processes of the same step differ by is then known."""

from pathlib import Path

import msgspec

from flopwise.capture.isolate import OnEvent, Worker, ignore
from flopwise.capture.point_builder import merged
from flopwise.records.events import Done
from flopwise.records.run import OK, Point
from flopwise.spec.workload import Trial

SEVERAL = 3
QUICK_START_S = (
    5.0  # a step that takes longer to build and warm up is measured in one process, unless more are asked for
)
LATER_SHARE = 1 / 3  # of the seconds, for every process after the first


def run_processes(
    worker: Worker, trial: Trial, log: Path | None = None, on_event: OnEvent = ignore, several: bool = False
) -> Point:
    """Measure one trial in `sampling.processes` processes; unless given, in one, or with `several` in three where they
    start quickly and no exact number of samples is asked for. One that fails, or is interrupted, is the last.
    """
    points = [worker.run(trial, log, on_event)]
    asked = trial.sampling.processes
    if asked is None:
        several = several and not trial.workload.many  # starting many ranks takes long
        asked = SEVERAL if several and trial.sampling.samples is None and _start_s(points[0]) < QUICK_START_S else 1
    seconds = max(0.01, LATER_SHARE * trial.sampling.seconds)
    later = msgspec.structs.replace(trial, sampling=msgspec.structs.replace(trial.sampling, seconds=seconds))
    while len(points) < asked and points[-1].status == OK:
        points.append(worker.run(later, log, on_event, watch=False))
    if len(points) == 1:
        return points[0]
    end = points[-1]
    return merged(points, Done(status=end.status, reason=end.reason, hint=end.hint, stopped=end.stopped))


def _start_s(point: Point) -> float:
    return (point.setup_ns + sum(point.warmup_ns)) / 1e9
