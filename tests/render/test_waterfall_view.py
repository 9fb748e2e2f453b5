"""A waterfall as people see it: bars that join, and a picture of the same parts."""

import json
from pathlib import Path

import pytest

from flopwise.cli.main import main
from flopwise.errors import FlopwiseError
from flopwise.records.waterfall import IDEAL, IDLE_LAUNCH, MATMUL_OTHER, Waterfall, WaterfallPart
from flopwise.render.step_charts import waterfall_chart
from flopwise.render.table import shown
from flopwise.render.waterfall_view import waterfall_table

COMPILED = Path(__file__).parent.parent / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"


def part(name, ns, **more):
    return WaterfallPart(name=name, ns=ns, share=ns / 10e6, how="measured", **more)


@pytest.fixture
def found():
    parts = (
        part(IDEAL, 6e6, by_class={"matmul": 5e6, "attention": 1e6}),
        part(MATMUL_OTHER, -1e6, why="below zero"),
        part(IDLE_LAUNCH, 5e6),
    )
    return Waterfall(
        step_ns=10e6, measured_by="the trace", parts=parts, mfu=0.5, hfu=None, roofline_share=None, notes=("n",)
    )


def test_each_bar_begins_where_the_last_one_ends(found):
    seen = shown(waterfall_table(found))
    assert seen.title == "From the ideal to the measured step: 10.0 ms, by the trace"
    bars = [row[3] for row in seen.cells]
    assert bars == ["█" * 19, " " * 16 + "░" * 3, " " * 16 + "█" * 16]
    assert seen.cells[0][4] == "matmul 5.00 ms, attention 1.00 ms"
    assert seen.notes == ["MFU 50.0 %", "n"]


def test_the_picture_has_the_same_parts(found):
    rows = waterfall_chart(found, "</script>").to_dict()["data"]["values"]
    assert [(row["begin"], row["end"]) for row in rows] == [(0, 6), (6, 5), (5, 10), (0, 10)]
    with pytest.raises(FlopwiseError, match="no waterfall"):
        waterfall_chart(None, "t")


def test_explain_draws_it_and_writes_it_for_programs(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["explain", str(COMPILED), "-o", str(tmp_path / "waterfall.svg")])
    assert left.value.code == 0
    assert "idle: late launches" in (tmp_path / "waterfall.svg").read_text()
    assert "wrote" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", str(COMPILED), "--format", "json"])
    told = json.loads(capsys.readouterr().out)["traces"][0]["waterfall"]
    assert sum(p["ns"] for p in told["parts"]) == pytest.approx(told["step_ns"])


def test_a_picture_is_of_one_trace(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["explain", str(COMPILED), str(COMPILED), "-o", str(tmp_path / "w.svg")])
    assert left.value.code == 2
    assert "a picture is of one target" in capsys.readouterr().err
