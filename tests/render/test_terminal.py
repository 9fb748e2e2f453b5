"""A table on a terminal of any width: every number whole, every row with its key, no line too long."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from flopwise.records.table import SENTENCE, Column, Table
from flopwise.render.terminal import text

TABLE = Table(
    "t",
    "t",
    columns=(Column("name"), *(Column(f"c{i}", f"column {i}", "ratio") for i in range(9))),
    rows=(
        {"name": "first"} | {f"c{i}": 100.125 + i for i in range(9)},
        {"name": "second"} | {f"c{i}": 5.5 for i in range(9)},
    ),
)


def lines_at(table, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    return [Text.from_ansi(line) for line in text(table, console).splitlines()]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_columns_that_do_not_fit_are_left_out_from_the_right_and_named(width):
    lines = [line.plain for line in lines_at(TABLE, width)]
    shown = [i for i in range(9) if any(f"{100.125 + i:.3f}" in line for line in lines)]
    assert shown == list(range(len(shown)))
    assert max(map(len, lines)) <= width
    assert [sum(line.startswith(name) for line in lines) for name in ("first", "second")] == [1, 1]
    hidden = " ".join(" ".join(lines).partition("hidden: ")[2].partition("(")[0].split())
    assert hidden == "; ".join(f"column {i}" for i in range(len(shown), 9))


def test_the_least_important_column_goes_first():
    columns = (Column("name"), Column("a", "plain", "ratio"), Column("b", "important", "ratio", importance=1))
    row = {"name": "x" * 16, "a": 1.0, "b": 2.0}
    lines = [line.plain for line in lines_at(Table("t", "t", columns, (row, row)), 30)]
    assert any("important" in line for line in lines)
    assert "1 column hidden: plain" in " ".join(" ".join(lines).split())


def test_a_pipe_gets_everything_in_one_line_per_row():
    assert [text(TABLE).count(word) for word in ("first", "108.125", "hidden")] == [1, 1, 0]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_sentence_is_broken_into_lines_and_stays_in_its_table(width):
    columns = (Column("name"), Column("why", unit=SENTENCE), Column("s", "n"))
    table = Table("t", "t", columns, ({"name": "warmup", "why": "a word " * 25, "s": 5},))
    lines = [line.plain for line in lines_at(table, width) if "hidden" not in line.plain]
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("name") for line in lines) == 1  # one block
    words = re.findall(r"\ba\b|\bword\b", " ".join(lines))
    assert words == ["a", "word"] * 25
    assert ("a word " * 25).strip() in text(table)  # a file or a pipe has it in one line


def test_a_name_without_spaces_is_folded_not_cut():
    table = Table("t", "t", (Column("name"), Column("n")), ({"name": "k" * 150, "n": 3},))
    lines = [line.plain for line in lines_at(table, 60)]
    assert sum(line.count("k") for line in lines) == 150
    assert max(map(len, lines)) <= 60


def test_a_single_row_that_does_not_fit_is_turned_and_keeps_all_columns():
    table = Table("t", "t", TABLE.columns, TABLE.rows[:1])
    lines = [line.plain for line in lines_at(table, 40)]
    assert all(any(f"column {i}" in line and f"{100.125 + i:.3f}" in line for line in lines) for i in range(9))
