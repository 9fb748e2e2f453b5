"""Progress of the lab on stderr: a bar with the time left on a terminal, a line per experiment elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from flopwise.experiments.results import Result
from flopwise.experiments.runner import LabProgress
from flopwise.render.visible import LONGEST_LINE, visible


class ShownLab(LabProgress):
    """Shows a run of the lab."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.live: Progress | None = None
        self.n_done = 0

    def begin(self, names: list[str]) -> None:
        self.n, self.begun = len(names), time.monotonic()
        if self.console.is_terminal and not self.quiet:
            counts = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn())
            text = TextColumn("{task.description}", markup=False)
            self.live = Progress(*counts, text, console=self.console, transient=True)
            self.task = self.live.add_task("starting", total=len(names))
            self.live.start()

    def doing(self, name: str, text: str) -> None:
        if self.live is not None:
            self.live.update(self.task, description=visible(f"{name}: {text}", LONGEST_LINE))

    def result(self, result: Result) -> None:
        self.n_done += 1
        if self.live is not None:
            self.live.update(self.task, completed=self.n_done)
        if not self.quiet:
            line = f"[{self.n_done}/{self.n}] {result.experiment}: {result.verdict.word}{self._left()}"
            self.console.print(Text(visible(line, LONGEST_LINE)), soft_wrap=True)

    def end(self) -> None:
        if self.live is not None:
            self.live.stop()

    def _left(self) -> str:
        """The time left, from the pace so far."""
        rest = self.n - self.n_done
        seconds = (time.monotonic() - self.begun) / self.n_done * rest
        if not rest:
            return ""
        return f" (about {seconds / 60:.0f} min left)" if seconds >= 90 else f" (about {seconds:.0f} s left)"
