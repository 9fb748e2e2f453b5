"""What a verb tells its caller while it works; the caller decides how to show it."""

from typing import Protocol

from flopwise.records.events import Event
from flopwise.records.run import Point
from flopwise.spec.workload import Trial


class Progress(Protocol):
    """Follows a run. Every call is cheap and may be ignored."""

    def begin(self, n_trials: int, n_done: int) -> None:
        """A run of so many trials begins; `n_done` of them are there already."""

    def trial(self, trial: Trial) -> None:
        """A trial begins."""

    def event(self, event: Event) -> None:
        """Something happened in it."""

    def point(self, point: Point) -> None:
        """It ended."""

    def note(self, text: str) -> None:
        """Something to know before it is too late."""

    def end(self) -> None:
        """The run is over."""


class Silent:
    """Progress that nobody watches."""

    def begin(self, n_trials: int, n_done: int) -> None:
        pass

    def trial(self, trial: Trial) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def point(self, point: Point) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass
