"""Progress on stderr: a live line with the time left on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from flopwise import units
from flopwise.capture.progress import Progress
from flopwise.capture.stopping import half_width
from flopwise.records.events import (
    Event,
    PairCompared,
    ProbeMeasured,
    Sampled,
    StepBuilt,
    Tracing,
    WarmedUp,
    WarmupStep,
)
from flopwise.records.run import OK, STEP, Point
from flopwise.render.visible import LONGEST_LINE, visible
from flopwise.spec.workload import Trial

_REDRAW_S = 0.2
_BAR, _COUNTED = 10, 24  # columns of the bar; with the spinner and the count


class TerminalProgress(Progress):
    """Follows a run of one or many trials; see `flopwise.capture.progress.Progress`."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.live: Bar | None = None
        self.compared: PairCompared | None = None

    def begin(self, n_trials: int, n_done: int) -> None:
        self.n_trials, self.n_done, self.n_before = n_trials, n_done, n_done
        self.begun, self.compared = time.monotonic(), None
        if n_done and not self.quiet:
            self.console.print(f"resuming: {n_done} of {n_trials} points are done", highlight=False)
        if self.console.is_terminal and not self.quiet:
            counted = (
                (MofNCompleteColumn(), BarColumn(_BAR)) if n_trials else ()
            )  # how many a tuning tries is not known
            self.live = _bar(self.console, SpinnerColumn(), *counted)
            self.task = self.live.add_task("starting", total=n_trials, completed=n_done)
            self.live.start()

    def trial(self, trial: Trial) -> None:
        self.label, self.seconds = trial.workload.label(), trial.sampling.seconds
        self.walls: list[int] = []
        self.compared = None
        self.state, self.drawn, self.sampling_since = "building", 0.0, 0.0
        self._draw(force=True)

    def event(self, event: Event) -> None:
        match event:
            case StepBuilt():
                self.state = "first step (with compilation, if any)"
            case WarmupStep():
                self.walls.append(event.wall_ns)
                self.state = f"warm-up {len(self.walls)}: {units.duration(event.wall_ns)}"
            case WarmedUp():
                self.walls, self.sampling_since = [], time.monotonic()
            case PairCompared():
                self.compared, self.state = event, "next pair"
            case Sampled():
                self.walls.append(event.phases[STEP].wall_ns)
                # Nothing is computed beside a measurement that nobody would see.
                if self.live is not None and time.monotonic() - self.drawn > _REDRAW_S:
                    self.state = self._sampling()
            case Tracing():
                self.state = f"tracing with {event.profiler}"
                if self.live is None and not self.quiet:
                    self.console.print(Text(visible(f"{self.label}: {self.state}", LONGEST_LINE)), soft_wrap=True)
            case _:
                return
        self._draw(force=isinstance(event, Tracing))

    def waiting(self, sent: int, left: int, where: str) -> None:
        if self.live is not None:
            more = f", {left} to send" if left else ""
            self.live.update(self.task, description=f"{sent} on {where}{more}")

    def point(self, point: Point) -> None:
        self.n_done += 1
        if self.quiet:
            return
        if self.live is not None:
            self.live.update(self.task, completed=self.n_done)
        if self.n_trials > 1:
            line = f"[{self.n_done}/{self.n_trials}] {point.trial.workload.label()}: {_outcome(point)}{self._left()}"
            self.console.print(Text(visible(line, LONGEST_LINE)), soft_wrap=True)

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(f"note: {text}"), soft_wrap=True)

    def end(self) -> None:
        if self.live is not None:
            self.live.stop()

    def _sampling(self) -> str:
        if self.compared is not None or self.n_trials == 0:  # the samples of two steps
            return f"sample {len(self.walls)}"
        spread = _rough_half_width(self.walls)
        known = f" ±{units.percent(spread)}" if spread < 1 else ""
        left = max(0.0, self.seconds - (time.monotonic() - self.sampling_since))
        return f"sample {len(self.walls)}: {units.duration(median(self.walls))}{known}, {left:.0f} s left at most"

    def _left(self) -> str:
        """The time left, from the pace so far."""
        done, rest = self.n_done - self.n_before, self.n_trials - self.n_done
        if not rest or self.compared is not None:  # both points of a comparison come at its end
            return ""
        seconds = (time.monotonic() - self.begun) / done * rest
        return f" (about {seconds / 60:.0f} min left)" if seconds >= 90 else f" (about {seconds:.0f} s left)"

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if self.live is not None and (force or now - self.drawn > _REDRAW_S):
            self.drawn = now
            room = max(self.console.width - _COUNTED, _COUNTED)  # what happens now, then as much of the name as fits
            shown = visible(f"{self._known()}{self.state} · {self.label}", room)
            self.live.update(self.task, description=shown)

    def _known(self) -> str:
        """Of a comparison: what its pairs of processes say so far."""
        if (seen := self.compared) is None:
            return ""
        pairs = "1 pair" if seen.pairs == 1 else f"{seen.pairs} pairs"
        return f"{pairs} of processes: {seen.ratio:.3f} of the time, {seen.left_s:.0f} s left at most; "


def _bar(console: Console, *columns: ProgressColumn) -> Bar:
    return Bar(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True)


def _rough_half_width(walls_ns: list[int]) -> float:
    """As `half_width`, by two order statistics: the measurement goes on beside it, so it must cost next to nothing."""
    n, ordered = len(walls_ns), sorted(walls_ns)
    apart = math.ceil(0.98 * math.sqrt(n))
    if n < 2 * apart + 2:
        return math.inf
    return (ordered[n // 2 + apart] - ordered[n // 2 - apart]) / 2 / max(median(ordered), 1)


def _outcome(point: Point) -> str:
    step = point.times()
    if point.status != OK or step is None:
        return f"{point.status}: {point.reason}"
    spread = half_width(step.wall_ns)
    known = f"±{units.percent(spread)}" if spread < 10 else f"(too few for an interval: {len(step.wall_ns)})"
    return f"{units.duration(median(step.wall_ns))} {known}"


@contextmanager
def calibration_progress(console: Console | None = None) -> Iterator[Callable[[Event], None]]:
    """A listener for a calibration's events."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        console.print("measuring this machine's limits, about a minute", highlight=False)
        yield lambda event: None
        return
    with _bar(console, TimeRemainingColumn(), MofNCompleteColumn(), BarColumn(_BAR)) as live:
        task = live.add_task("starting", total=None)

        def listen(event: Event) -> None:
            if isinstance(event, ProbeMeasured):
                what = f"{event.probe.what} {event.probe.dtype}".strip()
                live.update(task, completed=event.n, total=event.of, description=what)

        yield listen
