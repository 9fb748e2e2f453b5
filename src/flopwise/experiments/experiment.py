"""What an experiment is made of: a claim, a measurement, a judgement, pictures and tables. No torch here.

`measure` runs in a process of its own and yields rows as it gets them, so that a crash keeps those before it. All else is
pure: it is done again whenever a stored run is read. A row is a dictionary that JSON can hold, with the unit at the end of
each name: `_ns`, `_bytes`, `_bytes_per_s`, `_flops`, `_flops_per_s`, `_share` (of 1). Tables and charts show a value by
that ending; other numbers show as they are. What could not be measured is None, never a guess.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from flopwise.records.experiment import Place

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench  # it has torch

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

CONFIRMED, REFUTED, INCONCLUSIVE, NOT_MEASURABLE = "confirmed", "refuted here", "inconclusive", "not measurable here"
VERDICTS = (CONFIRMED, REFUTED, INCONCLUSIVE, NOT_MEASURABLE)


class Verdict(msgspec.Struct, frozen=True):
    """One of VERDICTS, and a sentence or two with the numbers that led to it."""

    word: str
    why: str


@dataclass(frozen=True)
class Rule:
    """A line across a picture, at a value in the unit of the axis's field."""

    axis: Literal["x", "y"]
    value: float
    label: str


@dataclass(frozen=True)
class Picture:
    """A chart as plain data; `render` draws it. Fields are named as in its rows, and units follow from their names.

    line, scatter: `y` over `x`; bar: `y` for each `x`; span: from `x` to `x2` for each `y`. `colour` and `column` (charts
    side by side, without rules) name fields of words; `words` are those of `colour` in an order that several pictures share,
    so that a word has one colour in all of them. `low` and `high` name the ends of an interval of `y`.
    """

    title: str
    kind: Literal["line", "bar", "scatter", "span"]
    rows: Rows
    x: str
    y: str
    x_title: str
    y_title: str
    caption: str = ""  # what to see in it; else the title
    x2: str = ""
    colour: str = ""
    words: tuple[str, ...] = ()
    column: str = ""
    low: str = ""
    high: str = ""
    x_log: bool = False
    y_log: bool = False
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class TableOf:
    """A table as plain data: `columns` are fields of the rows, in order, with their headings."""

    title: str
    columns: Mapping[str, str]
    rows: Rows
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Experiment:
    """An experiment; its file's `EXPERIMENT`."""

    name: str  # as on the command line: 'launch-overhead'
    number: int  # its place in the list
    line: str  # what it does, in one line
    claim: str  # one sentence that the measurement can refute
    measure: "Callable[[Bench], Iterable[Row]]"
    judge: Callable[[Rows, Place], Verdict]
    draw: Callable[[Rows, Place], list[Picture]]
    tabulate: Callable[[Rows, Place], list[TableOf]]
    takes_workload: bool = False  # --workload is for it


def part(rows: Rows, name: str) -> list[Mapping[str, Any]]:
    """The rows whose field `part` has this value: an experiment that measures several things tells them apart by it.

    >>> part([{"part": "a", "n": 1}, {"part": "b", "n": 2}], "b")
    [{'part': 'b', 'n': 2}]
    """
    return [row for row in rows if row.get("part") == name]
