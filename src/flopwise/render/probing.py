"""Progress of a calibration on stderr: a bar with the time left on a terminal, two plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flopwise.records.events import Event, ProbeMeasured


@contextmanager
def probing(console: Console | None = None) -> Iterator[Callable[[Event], None]]:
    """A listener for a calibration's events."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        console.print("measuring this machine's limits, about a minute", highlight=False)
        yield lambda event: None
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("starting", total=None)

        def listen(event: Event) -> None:
            if isinstance(event, ProbeMeasured):
                what = f"{event.probe.what} {event.probe.dtype}".strip()
                live.update(task, completed=event.n, total=event.of, description=what)

        yield listen
