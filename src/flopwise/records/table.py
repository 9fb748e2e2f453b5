"""A table as data: what views, reports and experiments produce. How it looks on a terminal or a page is `render`'s part."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flopwise import units

Row = Mapping[str, Any]

TEXT, SENTENCE, BAR = "text", "sentence", "bar"  # units of columns of words: names; prose; bars drawn in letters
FILES_ONLY = -1  # the importance of a column that only CSV has


class AtMost(float):
    """A number that the real one does not exceed."""


@dataclass(frozen=True)
class Column:
    """One field of the rows. Its unit follows from the ending of its key, unless another is given.

    >>> Column("peak_bytes").unit, Column("peak_bytes").title, Column("gpu_ns", "GPU", "ms").heading
    ('bytes', 'peak', 'GPU ms')
    """

    key: str
    title: str = ""
    unit: str = ""
    importance: int = 0  # where a table is too wide, the least important column goes first; of equals, the rightmost
    labels: Mapping[Any, str] | None = None  # what to show for a value, where that is not the value itself

    def __post_init__(self) -> None:
        unit = self.unit or units.unit_of(self.key)
        ending = f"_{units.unit_of(self.key)}"
        object.__setattr__(self, "title", self.title or self.key.removesuffix(ending).replace("_", " "))
        object.__setattr__(self, "unit", unit)

    @property
    def heading(self) -> str:
        """The title, with the unit where the cells do not say it."""
        return f"{self.title} ms" if self.unit == "ms" else self.title


@dataclass(frozen=True)
class Table:
    """Rows of raw values under columns, the most important first: the first one names the row. None shows as nothing."""

    key: str  # what it is about, whatever its title says: 'kernels'
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    most: int | None = None  # rows that people are shown; files have all
    total: bool = False  # the last row adds up the others
    group: str = ""  # on a terminal, tables of a group stand together under this heading

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns' keys, in order."""
        return tuple(column.key for column in self.columns)
