"""What a report is made of: the evidence of each target, and the blocks in which it is shown."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.roofline import Roofline
from flopwise.analysis.step_timeline import StepTimeline
from flopwise.experiments.results import LabRun
from flopwise.records.comparison import Comparison
from flopwise.records.finding import Finding
from flopwise.records.run import Point
from flopwise.records.tuning import Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.render.report.words import slug
from flopwise.render.table import Table
from flopwise.snapshot.answers import MemoryReport
from flopwise.store import StoredRun

MEASURED, PREDICTED, SPECIFIED = "measured", "predicted", "specified"
NO_ROOFLINE = "no roofline"  # how the note begins that says why
SPLIT = "measured and specified"  # a measured time, split by limits of which some are the datasheet's


@dataclass(frozen=True)
class Foretold:
    """A measured step beside what `account` says of it."""

    what: str  # the workload
    name: str  # what tells it from the others of its run
    measured_ns: float
    predicted_ns: float
    gpu_ns: float | None  # measured; None where it is not known exactly
    predicted_gpu_ns: float
    bound: str
    how: str  # the ceilings': measured or specified

    @property
    def error(self) -> float:
        """Of the prediction; above zero: the step is faster than foretold."""
        return self.predicted_ns / self.measured_ns - 1


@dataclass(frozen=True)
class ReportPart:
    """All that is known of one target. What is not known is None, and its section is left out."""

    name: str
    run: StoredRun | None = None
    explanation: Explanation | None = None
    waterfall: Waterfall | None = None
    findings: tuple[Finding, ...] = ()
    timeline: StepTimeline | None = None
    roofline: Roofline | None = None
    memory: MemoryReport | None = None
    pairs: tuple[tuple[Point, Point, Comparison], ...] = ()  # measured in turns: before, after, how they compare
    tuning: Tuning | None = None
    foretold: tuple[Foretold, ...] = ()  # steps whose GPU is known, each with its prediction
    lab: LabRun | None = None
    notes: tuple[str, ...] = ()  # what could not be told, and why

    @property
    def points(self) -> tuple[Point, ...]:
        """The run's points that were timed."""
        return tuple(p for p in self.run.points if p.phases) if self.run else ()


@dataclass(frozen=True)
class Report:
    """The targets in the order given."""

    parts: tuple[ReportPart, ...]
    command: str = ""


@dataclass(frozen=True)
class Picture:
    """A chart, drawn when it is needed, with the sentence that says what it shows."""

    name: str
    draw: Callable[[], Any]
    caption: str
    how: str = MEASURED
    use: str = ""  # what one can do with it on the page; a picture on paper has nothing to click
    parts: tuple[tuple[str, float, float], ...] = ()  # what one can go into: its name, from where to where
    doubtful: bool = (
        False  # its rows may not be as we write them: Markdown without pictures, too, says where it cannot be drawn
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", slug(self.name))  # it is an id and a file's name, and may hold anybody's words


@dataclass(frozen=True)
class Shown:
    """A table, and how its numbers were obtained; '' where it holds none. `anchors` name its rows: findings point at them."""

    table: Table
    how: str = MEASURED
    anchors: tuple[str, ...] = ()
    folded: bool = False  # closed until asked for
    whole: bool = False  # in Markdown, too, every row

    def __post_init__(self) -> None:
        object.__setattr__(self, "anchors", tuple(map(slug, self.anchors)))


@dataclass(frozen=True)
class Advice:
    """Findings, each with the kernels it is about: (anchor, short name)."""

    findings: tuple[Finding, ...]
    kernels: tuple[tuple[tuple[str, str], ...], ...]


Block = str | Picture | Shown | Advice


@dataclass(frozen=True)
class Section:
    """One kind of evidence."""

    key: str
    title: str
    blocks: tuple[Block, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", slug(self.key))  # as a picture's name
