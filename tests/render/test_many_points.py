"""Thousands of points: charts draw whole lines of some and say so, tables are written in pages, and nothing is lost."""

import json
import re

import pytest

from flopwise.records.table import SENTENCE, Column, Table
from flopwise.render import terminal
from flopwise.render.report.evidence import TableBlock
from flopwise.render.report.page import _table
from flopwise.render.run_charts import lines_drawn, points_drawn, sweep_chart
from flopwise.render.table import shown

HOSTILE = '</script><img src=x onerror="alert(1)"><!-- &amp; \u202e'


def line_rows(lines, length):
    return [
        {"x": x + 1, "series": f"n={n}", "shade": f"n={n}", "settings": f"n={n} x={x}", "wall_ms": 1.0 + x}
        | {"wall_low": 1.0 + x, "wall_high": 1.0 + x}
        for x in range(length)
        for n in range(lines)
    ]


@pytest.mark.parametrize(("lines", "length"), [(50, 100), (3, 900), (2, 700), (1, 4000), (4000, 1)])
def test_some_of_many_lines_are_drawn_whole_and_the_rest_is_counted(lines, length):
    rows = line_rows(lines, length)
    drawn, said = lines_drawn(rows)
    assert len(drawn) <= 1000
    assert f"{len(drawn):,} of {len(rows):,} points" in said
    kept = {row["series"] for row in drawn}
    assert "n=0" in kept
    whole = min(length, 1000)
    assert all(sum(row["series"] == name for row in drawn) == whole for name in kept)
    assert all(row in rows for row in drawn[:50])
    chart = sweep_chart("x", drawn, "wall_ms").to_dict(format="vega-lite")
    assert [row["settings"] for row in chart["datasets"]["rows"]] == [row["settings"] for row in drawn]


def test_few_points_are_all_drawn():
    rows = line_rows(10, 100)
    assert lines_drawn(rows) == (rows, "")
    assert points_drawn(rows[:200]) == (rows[:200], "")
    some, said = points_drawn(rows)
    assert (some[0], some[-1], len(some)) == (rows[0], rows[-1], 200)
    assert "200 of 1,000 points" in said


def test_a_long_table_has_its_first_rows_as_elements_and_all_as_data():
    columns = (Column("name"), Column("wall_ns", "wall", "ms"), Column("why", unit=SENTENCE))
    rows = tuple(
        {"name": f"{HOSTILE}{n}", "wall_ns": 1e6 * n / 7, "why": HOSTILE if n % 2 else None} for n in range(450)
    )
    table = Table("t", "t", columns, rows)
    page = _table(TableBlock(table), "key", "")
    (data,) = re.findall(r'<script type="application/json" id="key-rows">(.*?)</script>', page, re.DOTALL)
    assert not re.search(r"[<>&\u202e]", data)
    told = json.loads(data)
    assert [[one if isinstance(one, str) else one[0] for one in row] for row in told["rows"]] == shown(table).cells
    assert [float(row[1][1]) for row in told["rows"]] == [row["wall_ns"] for row in rows]
    assert page.count("<tr") == told["page"] + 1
    assert "<img" not in page
    short = Table("t", "t", columns, rows[: told["page"]])
    assert "<script" not in _table(TableBlock(short), "key", "")


def test_a_plain_table_reads_as_a_terminals(monkeypatch):
    columns = (Column("name"), Column("wall_ns", "wall", "ms"), Column("verdict"))
    rows = tuple(
        {"name": f"größe 模型 {n}" * (n % 4), "wall_ns": 10.0 ** (n % 9), "verdict": "faster"} for n in range(40)
    )
    table = Table("t", "t", columns, rows, ("a note",))
    plain = terminal.text(table)
    monkeypatch.setattr(terminal, "_one_line_each", lambda *_: False)
    assert terminal.text(table) == plain
