"""A table on a terminal of any width shows every number whole."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from flopwise.render.table import Column, Table
from flopwise.render.terminal import text

TABLE = Table(
    title="t",
    columns=(
        Column("name", "name", right=False),
        *(Column(f"c{i}", f"column {i}", lambda v: f"{v:.3f}") for i in range(9)),
    ),
    rows=(
        {"name": "first"} | {f"c{i}": 100.125 + i for i in range(9)},
        {"name": "second"} | {f"c{i}": 5.5 for i in range(9)},
    ),
)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_number_is_cut_and_every_line_fits(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    shown = text(TABLE, console)
    for i in range(9):
        assert f"{100.125 + i:.3f}" in shown
    if width >= 40:
        assert max(Text.from_ansi(line).cell_len for line in shown.splitlines()) <= width
    assert shown.count("second") == shown.count("first") >= 1


def test_a_pipe_gets_one_block():
    assert text(TABLE).count("first") == 1


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_sentence_is_broken_into_lines_and_stays_in_its_table(width):
    columns = (Column("name", "name", right=False), Column("why", "why", right=False, wraps=True), Column("s", "s"))
    table = Table("t", columns, ({"name": "warmup", "why": "a word " * 25, "s": 5},))
    shown = text(table, Console(width=width, force_terminal=True, no_color=True, file=io.StringIO()))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("name") for line in lines) == 1  # one block
    assert " ".join(" ".join(lines[2:]).replace("warmup", "").replace("5", "").split()) == ("a word " * 25).strip()
    assert ("a word " * 25).strip() in text(table)  # a file or a pipe has it in one line
