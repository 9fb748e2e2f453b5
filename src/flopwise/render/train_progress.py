"""Progress of a training on stderr: a live line with loss, speed and the time left on a terminal, plain lines elsewhere."""

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from flopwise import units
from flopwise.analysis.training import mfu
from flopwise.records.training import LOADER, Begun, Steps
from flopwise.render.visible import LONGEST_LINE, visible
from flopwise.spec.workload import Workload
from flopwise.training.progress import TrainingProgress

_LINE_S = 5.0  # between plain lines


class TerminalTraining(TrainingProgress):
    """Shows a training as it goes."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.live: Progress | None = None

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(visible(text, LONGEST_LINE)), soft_wrap=True)

    def begin(self, begun: Begun, workload: Workload) -> None:
        self.begun, self.total = begun, begun.settings.steps
        self.tokens = workload.batch * workload.context * begun.settings.accumulate * begun.settings.world
        self.shown_at, self.pace = 0.0, math.nan
        if begun.step:
            self.note(f"resuming after step {begun.step:,}")
        if self.console.is_terminal and not self.quiet:
            counts = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(12), TimeRemainingColumn())
            text = TextColumn("{task.description}", markup=False)
            self.live = Progress(*counts, text, console=self.console, transient=True)
            self.task = self.live.add_task(
                "first step (with compilation, if any)", total=self.total, completed=begun.step
            )
            self.live.start()

    def steps(self, row: Steps) -> None:
        step_ns = row.wall_ns / max(1, len(row.losses))
        words = [f"loss {row.loss:.3f}", f"{units.count(self.tokens / step_ns * 1e9)} tokens/s"]
        words += [f"MFU {units.percent(share)}"] if (share := mfu(self.begun, step_ns)) is not None else []
        words += [units.size(row.memory_bytes)] if row.memory_bytes is not None else []
        words += [f"held out {row.evaluation:.3f}"] if row.evaluation is not None else []
        words += (
            [f"the loader stalls: {units.percent(row.waited_ns / row.wall_ns)}"] if row.limited_by == LOADER else []
        )
        if self.live is not None:
            self.live.update(self.task, completed=row.step, description=", ".join(words))
        elif not self.quiet and (row.evaluation is not None or time.monotonic() - self.shown_at > _LINE_S):
            self.shown_at = time.monotonic()
            left = units.duration(step_ns * (self.total - row.step))
            words += [f"about {left} left"] if row.step < self.total else []
            self.note(f"[{row.step}/{self.total}] " + ", ".join(words))

    def end(self) -> None:
        if self.live is not None:
            self.live.stop()
