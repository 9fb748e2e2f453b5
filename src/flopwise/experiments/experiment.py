"""What an experiment is made of: a claim, a measurement, a judgement, pictures and tables. No torch here.

`measure` runs in a process of its own and yields rows as it gets them, so that a crash keeps those before it. Everything else is
pure: it is done again whenever a stored run is read.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from flopwise.experiments.rows import Row
from flopwise.experiments.verdict import Check, Verdict, conclude
from flopwise.records.experiment import Place
from flopwise.records.table import SENTENCE, Column, Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench  # it has torch

R = TypeVar("R", bound=Row)
_SENTENCE = 40  # characters: a longer cell may be broken into lines
_UNIT = re.compile("_(ns|bytes|share|flops|bytes_per_s|flops_per_s)$")
Values = Sequence[Mapping[str, Any]]  # rows of a table or a picture: a row's fields, and what follows from them


@dataclass(frozen=True)
class Rule:
    """A line across a picture, at a value in the unit of the axis's field."""

    axis: Literal["x", "y"]
    value: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A field of the rows, and the axis's title. The unit follows from the field's name."""

    field: str
    title: str = ""
    log: bool = False
    to: str = ""  # the x axis of a span: the field of its other end
    interval: tuple[str, str] | None = None  # the fields of an interval's two ends

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self.field, self.to, *(self.interval or ())) if name)


@dataclass(frozen=True)
class Picture:
    """A chart as plain data; `render` draws it.

    line, scatter: `y` over `x`; bar: `y` for each `x`; span: from `x` to its `to` for each `y`. `colour` and `column` (charts
    side by side, without rules) name fields of words. `words` are the words of `colour` in an order that several pictures share,
    so that a word has the same colour in all of them.
    """

    kind: Literal["line", "bar", "scatter", "span"]
    rows: Values
    x: Axis
    y: Axis
    colour: str = ""
    words: tuple[str, ...] = ()
    column: str = ""
    rules: tuple[Rule, ...] = ()
    title: str = ""
    caption: str = ""  # what to see in it

    @property
    def has_points(self) -> bool:
        return any(row.get(self.x.field) is not None and row.get(self.y.field) is not None for row in self.rows)

    def titled(self, title: str, caption: str = "") -> "Picture":
        return replace(self, title=title, caption=caption)


line, bar = partial(Picture, "line"), partial(Picture, "bar")
scatter, span = partial(Picture, "scatter"), partial(Picture, "span")


def table_of(title: str, headings: Mapping[str, str], rows: Values, notes: tuple[str, ...] = ()) -> Table:
    """A table of fields of the rows, in order, with their headings; a column's unit follows from its field's name."""

    def column(key: str, heading: str) -> Column:
        long = any(len(row[key]) > _SENTENCE for row in rows if isinstance(row.get(key), str))
        return Column(key, heading, SENTENCE if long else "")

    return Table("lab-rows", title, tuple(column(*one) for one in headings.items()), tuple(rows), notes)


def columns(*plain: str, **headings: str) -> dict[str, str]:
    """Fields and their headings; the heading of a plain one is its name without the unit.

    >>> columns("way", "wall_ns", moved_bytes="bytes moved")
    {'way': 'way', 'wall_ns': 'wall', 'moved_bytes': 'bytes moved'}
    """
    return {name: _UNIT.sub("", name).replace("_", " ") for name in plain} | headings


@dataclass(frozen=True)
class Experiment(Generic[R]):
    """An experiment; its file's `EXPERIMENT`."""

    number: int  # its place in the list
    name: str  # as on the command line: 'launch-overhead'
    line: str  # what it does, in one line
    claim: str  # one sentence that the measurement can refute
    kinds: tuple[type[Row], ...]  # of its rows; a stored row is the first kind that it fits
    measure: "Callable[[Bench], Iterable[R]]"
    judge: Callable[[Sequence[R], Place], Iterable[Check]]
    draw: Callable[[Sequence[R], Place], list[Picture]]
    tabulate: Callable[[Sequence[R], Place], list[Table]]
    takes_workload: bool = False  # --workload is for it

    def read(self, rows: Iterable[Mapping[str, Any]]) -> list[R]:
        """Rows as they are stored; raises `msgspec.ValidationError` if one is not of this experiment."""
        return [self._read(row) for row in rows]

    def _read(self, row: Mapping[str, Any]) -> R:
        *others, last = self.kinds
        for kind in others:
            try:
                return msgspec.convert(row, kind)  # type: ignore[return-value]
            except msgspec.ValidationError:
                continue
        return msgspec.convert(row, last)  # type: ignore[return-value]

    def verdict(self, rows: Sequence[R], place: Place) -> Verdict:
        return conclude(self.judge(rows, place))
