"""What is left of a step, as people see it."""

from pathlib import Path

import msgspec
import pytest

from flopwise.records.limit import CASTS, LAUNCH, MATMUL, LimitCause, StepLimit
from flopwise.render.limit_view import limit_sentence, limit_table
from flopwise.render.screen import LINES, screen_lines
from flopwise.render.step_charts import limit_chart
from flopwise.render.table import shown
from flopwise.render.tune_screen import tune_screen
from flopwise.render.tune_view import tune_view
from flopwise.store import StoredRun
from flopwise.store.tuning import read_tuning

TUNED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11-tune-final" / "2.7B-16x1024"


@pytest.fixture
def found():
    causes = (
        LimitCause(key=MATMUL, ns=8e6, least_ns=6e6),
        LimitCause(key=CASTS, ns=1e6),
        LimitCause(key=LAUNCH, ns=3e6),
    )
    return StepLimit(
        step_ns=12e6, limit_ns=6e6, peak_ns=5e6, capped_ns=1e6, clock_mhz=1525.0, peak_mhz=1830.0, causes=causes
    )


def test_the_sentence_has_the_limit_and_the_largest_causes(found):
    assert limit_sentence(found) == (
        "Power-capped limit (1525 MHz): 6.00 ms, 50 % of the step. "
        "Beyond it: idle: late launches 3.00 ms, matmul 2.00 ms, fp8 casts and scales 1.00 ms."
    )
    alone = msgspec.structs.replace(found, clock_mhz=None, step_ns=6e6, causes=found.causes[:1])
    assert limit_sentence(alone) == "Roofline limit: 6.00 ms, 100 % of the step."


def test_the_table_adds_up(found):
    table = limit_table(found)
    *rows, whole = table.rows
    assert [row["cause"] for row in rows] == ["idle: late launches", "matmul", "fp8 casts and scales"]
    for column in ("ns", "least_ns", "beyond_ns"):
        assert sum(row[column] for row in rows) == whole[column]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert "1.00 ms more as the power cap holds 1525 MHz instead of 1830" in shown(table).notes[0]


def test_each_bar_begins_where_the_one_above_ends(found):
    rows = limit_chart(found, "t").to_dict()["data"]["values"]
    ends = {row["part"]: (row["begin"], row["end"]) for row in rows}
    assert ends["power-capped limit (1525 MHz)"] == (0, 6)
    assert ends["idle: late launches"] == (6, 9)
    assert ends["matmul"] == (9, 11)
    assert ends["fp8 casts and scales"] == (11, 12)
    assert ends["the step"] == (0, 12)


def tuned(limit):
    tuning = read_tuning(StoredRun.load(TUNED))
    after = msgspec.structs.replace(tuning.ended.waterfall, limit=limit)
    return msgspec.structs.replace(tuning, ended=msgspec.structs.replace(tuning.ended, waterfall=after))


def test_a_tuning_shows_it_on_its_screen_and_in_its_tables(found):
    lines = [line.plain for line in screen_lines(tune_screen(tuned(found)))]
    assert len(lines) <= LINES
    assert any(line.startswith("Power-capped limit (1525 MHz): 6.00 ms") for line in lines)
    assert "limit" in [table.key for table in tune_view(tuned(found)).tables]
    assert "limit" not in [table.key for table in tune_view(tuned(None)).tables]
