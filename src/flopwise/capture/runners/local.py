"""This machine: one trial after the other, so that none disturbs another."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress
from flopwise.capture.runners.measured import RunFolder, measured
from flopwise.capture.runners.runner import Runner
from flopwise.capture.traced_trial import check_device, check_nsys
from flopwise.records.events import DeviceInfo
from flopwise.records.run import INTERRUPTED, Point
from flopwise.spec.workload import NSYS, Trial


class LocalRunner(Runner):
    """All trials are forks of one process that has torch loaded."""

    def __init__(self) -> None:
        self.worker: Worker | None = None

    def check(self, trials: Sequence[Trial]) -> Mapping[str, DeviceInfo]:
        self.worker = Worker(any(trial.workload.recipe.compile != "off" for trial in trials))
        there = {name: self.worker.look(name) for name in dict.fromkeys(trial.device for trial in trials)}
        for device in dict.fromkeys(trial.device for trial in trials if trial.trace == NSYS):
            check_nsys(device)
            check_device(there[device].device)
        return there

    def measure(
        self, trials: Sequence[Trial], folder: RunFolder, progress: Progress, begin: Callable[[Trial], None]
    ) -> Iterator[Point]:
        assert self.worker is not None  # `check` comes first
        for trial in trials:
            begin(trial)
            point = measured(self.worker, trial, folder, progress)
            yield point
            if point.status == INTERRUPTED:
                raise KeyboardInterrupt

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
