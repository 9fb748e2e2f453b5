"""Rows of a run that was cut off, and rows that nobody measured: both are judged, drawn and shown, and neither is believed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from flopwise.api.report import report
from flopwise.experiments import results
from flopwise.experiments.catalog import experiments
from flopwise.experiments.experiment import Axis, Picture
from flopwise.experiments.results import AS_STORED, LabRun, Planned, answer, read_lab
from flopwise.experiments.rows import Row
from flopwise.experiments.verdict import Verdict
from flopwise.render.lab_charts import picture_chart
from flopwise.render.lab_view import summary
from flopwise.render.report import Report, ReportPart, markdown_report
from flopwise.render.table import shown as as_shown
from flopwise.store.files import LAB, LAB_RUNNING

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11"
MEASURED = {
    result.experiment: result
    for name in ("lab", "lab-warmup", "lab-attention", "lab-claims")
    if (RESULTS / name).is_dir()
    for result in read_lab(RESULTS / name).results
}


class Other(Row, frozen=True):
    other: int


NEVER = (None, [], 0, -1, 10**15, 1e308, 10**400, "word", True)


def prefixes(rows):
    """Every beginning of few rows; of many, those where a new kind of row begins, and some between."""
    kinds = [row.get("part") for row in rows]
    changes = {n + more for n in range(1, len(rows)) if kinds[n] != kinds[n - 1] for more in (0, 1)}
    return sorted({*range(1, min(25, len(rows))), *changes, *range(1, len(rows), 23), len(rows)})


def shown(found):
    for table in found.tables:
        assert len(as_shown(table).cells) == len(table.rows)
    for picture in found.pictures:
        json.dumps(picture_chart(picture).to_dict(format="vega-lite"), allow_nan=False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MEASURED)
def test_every_beginning_of_the_measured_rows_is_shown(name):
    whole = MEASURED[name]
    for n in prefixes(whole.rows):
        begun = answer(msgspec.structs.replace(whole, rows=whole.rows[:n]))
        assert begun.problems == (), n
        assert AS_STORED not in begun.verdict.why, n
        if n in (1, 2, 3, len(whole.rows) // 2, len(whole.rows) - 1):
            shown(begun)
        cut = msgspec.structs.replace(whole, rows=whole.rows[:n], status="timeout", reason="it took too long")
        assert answer(cut).verdict.word == "inconclusive"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MEASURED)
def test_no_value_takes_the_reading_down(name):
    """Each field of a row in turn is what was never measured."""
    whole = MEASURED[name]
    whole = msgspec.structs.replace(whole, rows=whole.rows[:150] if len(whole.rows) > 400 else whole.rows)
    kinds = {row.get("part"): n for n, row in enumerate(whole.rows)}
    for value in NEVER:
        for n in kinds.values():
            for field in whole.rows[n]:
                rows = list(whole.rows)
                rows[n] = {**rows[n], field: value}
                found = answer(msgspec.structs.replace(whole, rows=tuple(rows)))
                for table in found.tables:
                    as_shown(table)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MEASURED)
def test_no_value_takes_a_chart_down(name):
    """All but the first field of every row are what was never measured."""
    whole = MEASURED[name]
    for value in (*NEVER, float("nan"), {"a": 1}):
        rows = tuple({**row, **dict.fromkeys(list(row)[1:], value)} for row in whole.rows[:40])
        for picture in answer(msgspec.structs.replace(whole, rows=rows)).pictures:
            json.dumps(picture_chart(picture).to_dict(format="vega-lite"), allow_nan=False)


def test_a_page_of_rows_that_nobody_measured(tmp_path):
    """Charts that cannot be drawn say so in their place; the rest of the page is there."""
    run = tmp_path / "run"
    shutil.copytree(RESULTS / "lab-attention", run)
    planned = (run / LAB).read_bytes().splitlines()[0] + b"\n"
    results = []
    for name, whole in MEASURED.items():
        for value in (None, [], 10**400, {"a": 1}):
            strange = tuple({**row, **dict.fromkeys(list(row)[1:], value)} for row in whole.rows[:40])
            results.append(msgspec.structs.replace(whole, rows=strange))
        results.append(msgspec.structs.replace(whole, experiment=name, rows=({},)))
    (run / LAB).write_bytes(planned + b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    page = report(run, output=tmp_path / "page.html").read_text()
    assert AS_STORED in page
    assert "could not be made" in page
    text = report(run, output=tmp_path / "page.md").read_text()
    assert text.count(AS_STORED) > 1
    assert "could not be made" in text


def test_what_was_not_judged_again_is_not_counted_as_a_verdict(tmp_path, monkeypatch):
    """Neither in the headline, nor as measured; and a chart that fails is told of without pictures, too."""
    one = MEASURED["warmup"]
    old = msgspec.structs.replace(one, verdict=Verdict("confirmed", "as it was"), rows=({"other": 1},))
    new = MEASURED["data-types"]
    found = LabRun("r", Planned(experiments=("warmup", "data-types")), (old, new))
    assert summary(found).endswith(f"1 {answer(new).verdict.word}, 1 as stored, not judged again")
    known = experiments()["warmup"]
    drawn = Picture("pie", ({"n": 1, "ns": 1},), Axis("n", "n"), Axis("ns", "t"), title="times")
    strange = replace(known, kinds=(Other,), draw=lambda rows, place: [drawn])
    monkeypatch.setattr(results, "experiments", lambda: {"warmup": strange})
    text = markdown_report(Report((ReportPart(name="lab", lab=replace(found, results=(old,))),)))
    assert "confirmed, as stored" in text
    assert "(measured)" not in text
    assert "This chart could not be drawn; its numbers are in the tables. times" in text


def test_rows_so_far_that_cannot_be_read_leave_the_others(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RESULTS / "lab-attention", run)
    whole = read_lab(run)
    (run / LAB_RUNNING).write_text('{"experiment":"warmup","row":{}}\nnot json\n{"experiment":"warmup","row":{}}\n')
    found = read_lab(run)
    assert (found.results[: len(whole.results)], whole.warnings) == (whole.results, ())
    assert [len(one.rows) for one in found.results[len(whole.results) :]] == [2]
    text = report(run, output=tmp_path / "page.md").read_text()
    assert "cannot be read" in text
    assert LAB_RUNNING in text


def test_a_number_that_json_does_not_have_is_refused_in_a_line(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RESULTS / "lab-attention", run)
    (run / LAB).write_text((run / LAB).read_text().replace('"rows":[{', '"rows":[{"x":NaN,'))
    assert any("JSON is malformed" in line for line in read_lab(run).warnings)


@pytest.mark.parametrize("sms", [10**15, -1, 0, 10**400, None, "132", float("nan")])
def test_a_chip_of_any_number_of_multiprocessors_is_read_at_once(sms):
    whole = MEASURED["tile-quantization"]
    rows = tuple({**row, "sms": sms} if "sms" in row else row for row in whole.rows)
    assert AS_STORED in answer(msgspec.structs.replace(whole, rows=rows)).verdict.why


def test_a_picture_without_rows_is_still_a_chart():
    empty = Picture("line", (), Axis("n", "n", log=True), Axis("wall_ns", "t"), title="t")
    assert picture_chart(empty).to_dict(format="vega-lite")


def test_the_markdown_has_every_verdict(tmp_path):
    text = report(RESULTS / "lab", output=tmp_path / "page.md").read_text()
    there = [result.experiment for result in read_lab(RESULTS / "lab").results]
    assert [name for name in there if f"| {name} |" not in text] == []
    assert " 1 rows more" not in text
