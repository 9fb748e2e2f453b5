"""A terminal shows as many rows as one reads, and says how many there are more; nothing is lost in a file."""

from flopwise.records.table import Column, Table
from flopwise.render import terminal


def test_rows_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr(terminal, "MOST_ROWS", 3)
    table = Table("numbers", "Numbers", (Column("n"),), tuple({"n": n} for n in range(1000, 1005)))
    lines = terminal.text(table).splitlines()
    assert [line for line in lines if line.strip().startswith("100")] == ["1000", "1001", "1002"]
    assert lines[-1].strip() == "2 rows more (--format csv shows all)"
    monkeypatch.setattr(terminal, "MOST_ROWS", 5)
    assert "more" not in terminal.text(table)
