"""The one interface of all runners: trials in, their rows out, in the order in which they end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from flopwise.capture.progress import Progress
from flopwise.capture.runners.measured import RunFolder
from flopwise.records.events import DeviceInfo
from flopwise.records.run import Point
from flopwise.spec.workload import Trial


class Runner(ABC):
    """Runs trials, each in a process of its own. Whoever asks for the rows writes them down."""

    @abstractmethod
    def check(self, trials: Sequence[Trial]) -> Mapping[str, DeviceInfo]:
        """Refuse what can never run, before there is a run; what is known of the devices, by the name asked for."""

    @abstractmethod
    def measure(
        self, trials: Sequence[Trial], folder: RunFolder, progress: Progress, begin: Callable[[Trial], None]
    ) -> Iterator[Point]:
        """The rows, as the trials end. After an interruption: what was measured, then KeyboardInterrupt.

        `begin` is called as a trial begins, where one runs at a time.
        """

    @abstractmethod
    def close(self) -> None:
        """End all that still runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
