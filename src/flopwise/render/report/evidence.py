"""What a report is made of: what is known of each target, and the blocks in which it is shown."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.roofline import Roofline
from flopwise.analysis.step_timeline import StepTimeline
from flopwise.experiments.results import LabRun
from flopwise.records.comparison import Comparison
from flopwise.records.finding import Finding
from flopwise.records.ranks import RanksExplanation
from flopwise.records.run import Point
from flopwise.records.table import Table
from flopwise.records.training import Training
from flopwise.records.tuning import Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.snapshot.answers import MemoryReport
from flopwise.store import StoredRun

MEASURED, PREDICTED, SPECIFIED = "measured", "predicted", "specified"
SPLIT = "measured and specified"  # a measured time, split by limits of which some are the datasheet's
BOTH = "measured and predicted"

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_KEY = 80


def slug(text: str) -> str:
    """A name as it may stand in an id, an address or a file's name: nothing in it ends an attribute or leaves a folder.

    >>> slug('x"><meta http-equiv=refresh>'), slug("../../etc"), slug("lab-warmup")
    ('x-meta-http-equiv-refresh-', '-etc', 'lab-warmup')
    """
    return _NOT_PLAIN.sub("-", text)[:_LONGEST_KEY]


@dataclass(frozen=True)
class StepPrediction:
    """A measured step and what `account` predicts for it."""

    workload: str
    name: str  # what distinguishes it from the others of its run
    measured_ns: float
    predicted_ns: float
    gpu_ns: float | None  # measured; None where it is not known exactly
    predicted_gpu_ns: float
    bound: str
    how: str  # the ceilings': measured or specified

    @property
    def error(self) -> float:
        """Of the prediction; above zero: the step is faster than predicted."""
        return self.predicted_ns / self.measured_ns - 1


@dataclass(frozen=True)
class ReportPart:
    """All that is known of one target. What is not known is None, and its section is left out."""

    name: str
    run: StoredRun | None = None
    explanation: Explanation | None = None
    host: HostExplanation | None = None  # of a trace without GPU work
    ranks: RanksExplanation | None = None  # of the traces of a job's ranks
    waterfall: Waterfall | None = None
    findings: tuple[Finding, ...] = ()
    timeline: StepTimeline | None = None
    roofline: Roofline | None = None
    no_roofline: str = ""  # why there is none, of a trace
    memory: MemoryReport | None = None
    pairs: tuple[
        tuple[Point, Point, Comparison], ...
    ] = ()  # measured against each other: before, after, how they compare
    tuning: Tuning | None = None
    predictions: tuple[StepPrediction, ...] = ()  # of steps whose GPU is known
    lab: LabRun | None = None
    training: Training | None = None
    notes: tuple[str, ...] = ()  # what could not be read, and why
    damage: tuple[str, ...] = ()  # of its run: what is lost, or may be wrong

    @property
    def points(self) -> tuple[Point, ...]:
        """The run's points that were timed."""
        return tuple(p for p in self.run.points if p.phases) if self.run else ()


@dataclass(frozen=True)
class Report:
    """The targets in the order given."""

    parts: tuple[ReportPart, ...]
    command: str = ""

    def prefixes(self) -> list[str]:
        """What the keys of each part begin with, so that no two parts share one."""
        return [f"t{i + 1}-" if len(self.parts) > 1 else "" for i in range(len(self.parts))]


@dataclass(frozen=True)
class ChartBlock:
    """A chart, drawn when it is needed, with the sentence that says what it shows."""

    key: str
    draw: Callable[[], Any]
    caption: str
    how: str = MEASURED
    use: str = ""  # what one can do with it on the page; a picture on paper has nothing to click
    parts: tuple[tuple[str, float, float], ...] = ()  # what one can go into: its name, from where to where
    doubtful: bool = False  # its rows come from a file, and may not be drawable: Markdown, too, says so

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", slug(self.key))  # it is an id and a file's name, and may hold anybody's words


@dataclass(frozen=True)
class TableBlock:
    """A table, and how its numbers were obtained; '' where it holds none. `anchors` name its rows: findings link to them."""

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


@dataclass(frozen=True)
class CodeBlock:
    """Lines to copy, of one file or several: title, text, language."""

    files: tuple[tuple[str, str, str], ...]


Block = str | ChartBlock | TableBlock | Advice | CodeBlock


@dataclass(frozen=True)
class Number:
    """A time of the step, or a size, that the page begins with."""

    label: str
    value: str
    share: str = ""  # MFU, where that is known
    note: str = ""
    how: str = MEASURED


@dataclass(frozen=True)
class Change:
    """One of the changes worth most, in a few words."""

    title: str
    saves: str
    why: str = ""
    line: str = ""  # to type
    anchor: str = ""  # of the place on the page that says more
    link: str = ""  # what the link to it says


@dataclass(frozen=True)
class Overview:
    """What one sees first of a target."""

    verdict: str
    numbers: tuple[Number, ...] = ()
    picture: ChartBlock | None = None
    changes: tuple[Change, ...] = ()
    heading: str = ""  # of the changes
    how: str = PREDICTED  # what the changes save


@dataclass(frozen=True)
class Section:
    """One kind of evidence."""

    key: str
    title: str
    blocks: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", slug(self.key))
