"""What a verb reports while it works; the caller decides how to show it."""

from flopwise.records.events import Event
from flopwise.records.run import Point
from flopwise.spec.workload import Trial


class Progress:
    """Follows a run; this one ignores every call."""

    def begin(self, n_trials: int, n_done: int) -> None:
        """A run of so many trials begins; `n_done` of them are there already."""

    def trial(self, trial: Trial) -> None:
        """A trial begins."""

    def event(self, event: Event) -> None:
        """Something happened in it."""

    def waiting(self, sent: int, left: int, where: str) -> None:
        """On a cluster: so many trials are with it, running or queued, and so many are not sent yet."""

    def point(self, point: Point) -> None:
        """It ended."""

    def note(self, text: str) -> None:
        """Something to know before it is too late."""

    def end(self) -> None:
        """The run is over."""
