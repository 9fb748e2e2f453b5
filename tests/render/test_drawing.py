"""Pictures are drawn elsewhere: what goes wrong there costs a picture, and no page."""

import os
from pathlib import Path

import pytest

pytest.importorskip("vl_convert")
from flopwise.render import drawing as room
from flopwise.render.charts import NOT_DRAWN
from flopwise.render.drawing import Drawing, NotDrawn

TRACE = Path(__file__).parents[1] / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"
ENCODED = {"x": {"field": "data", "type": "quantitative"}}
GOOD = {"mark": "point", "data": {"values": [{"data": 1}, {"data": 2}]}, "encoding": ENCODED}
BAD = {"mark": "no such mark"}
ENDLESS = {"mark": "point", "data": {"sequence": {"start": 0, "stop": 3e8}}, "encoding": ENCODED}
HANGS = "import sys, time\nsys.stdin.readline()\ntime.sleep(600)"
PARTIAL = "import sys\nsys.stdin.readline()\nprint(100)\nprint('<svg')"


def test_one_process_draws_all():
    with Drawing() as drawing:
        process = drawing._process.pid
        assert drawing.picture(GOOD, ".svg").startswith(b"<svg")
        with pytest.raises(NotDrawn):
            drawing.picture(BAD, ".svg")
        assert drawing.picture(GOOD, ".png").startswith(b"\x89PNG")
        assert drawing._process.pid == process
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("limit", [("CPU_S", 1), ("DATA_BYTES", 500 * 2**20)], ids=["time", "memory"])
def test_a_chart_without_end_costs_itself_alone(monkeypatch, limit):
    with Drawing() as drawing:
        with monkeypatch.context() as patch:
            patch.setattr(room, *limit)
            with pytest.raises(NotDrawn, match="could not be drawn"):
                drawing.picture(ENDLESS, ".svg")
        assert drawing.picture(GOOD, ".svg").startswith(b"<svg")


def test_a_definition_that_is_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(room, "MOST_BYTES", 10)
    with Drawing() as drawing, pytest.raises(NotDrawn):
        drawing.picture(GOOD, ".svg")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("program", [HANGS, PARTIAL, "raise SystemExit(1)"], ids=["hangs", "answers in part", "ends"])
def test_the_page_comes_without_pictures(monkeypatch, tmp_path, cli, program):
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(room, "_PROGRAM", str(tmp_path / "program.py"))
    monkeypatch.setattr(room, "WALL_S", 1.0)
    started = []
    begin = room._started
    monkeypatch.setattr(room, "_started", lambda: started.append(1) or begin())
    assert cli("report", TRACE, "-o", "page.md", "--pictures", cwd=tmp_path).returncode == 0
    assert len(started) == room.MOST_FAILED
    page = (tmp_path / "page.md").read_text()
    assert page.count(NOT_DRAWN) >= 3
    assert "](" not in page
    ended = cli("explain", TRACE, "-o", "picture.svg", cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 2)
    assert "the chart could not be drawn" in ended.stderr
    assert not (tmp_path / "picture.svg").exists()
