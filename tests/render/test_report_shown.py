"""What a report shows of names, savings, commands and parts that others wrote: the same on the page and in Markdown."""

import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from flopwise.api.report import gather, report
from flopwise.cli.report import command
from flopwise.experiments.experiment import Verdict
from flopwise.experiments.results import LabRun, Planned, Result
from flopwise.records.finding import Finding
from flopwise.render.axes import labels_of
from flopwise.render.chart_style import NEUTRAL
from flopwise.render.report import Report, ReportPart, html_report, markdown_report
from flopwise.render.report.evidence import ChartBlock, Section
from flopwise.render.report.sections import provenance
from flopwise.render.run_charts import predicted_measured_chart, sweep_chart, sweep_rows
from flopwise.render.step_charts import waterfall_chart
from flopwise.store import StoredRun

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))
from report_pages import COMPILED, waterfall

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11"
TUNED = RUNS.with_name("h200-2026-11-tune-final")
HOSTILE = 'x"><img src=x>/../../[a](b)*'


def lab_part(*names):
    results = tuple(Result(experiment=n, claim="c", status="ok", verdict=Verdict("held", "w")) for n in names)
    return ReportPart(name="lab", lab=LabRun(run="r", planned=Planned(experiments=names), results=results))


def advised(*findings):
    return ReportPart(name="p", waterfall=waterfall(), findings=findings)


def finding(**given):
    return Finding(**({"rule": "r", "title": "t", "arithmetic": ""} | given))


def ids(page):
    return re.findall(r' id="([^"]*)"', page)


def test_every_key_is_plain_whatever_it_was_made_of():
    assert re.fullmatch(r"[\w-]+", Section(key=HOSTILE, title="t").key)
    assert re.fullmatch(r"[\w-]+", ChartBlock(HOSTILE, lambda: None, "c").key)
    page = html_report(Report(parts=(lab_part(HOSTILE, HOSTILE, "x" * 300, "x" * 301),)))
    assert "<img src=x" not in page
    assert max(Counter(ids(page)).values()) == 1
    assert all(re.fullmatch(r"[\w-]+", one) for one in ids(page))


def test_a_title_is_text_in_markdown():
    text = markdown_report(Report(parts=(lab_part("<img src=x>"),)))
    assert "<summary>&lt;img src=x&gt;</summary>" in text
    assert "<img src=x" not in text


def test_how_numbers_were_obtained_is_text_too():
    part = gather(COMPILED)
    found = Report(parts=(replace(part, roofline=msgspec.structs.replace(part.roofline, how=HOSTILE)),))
    assert "<img src=x" not in html_report(found)
    assert "<img src=x" not in markdown_report(found, {"roofline": "r.svg"})


@pytest.mark.parametrize(
    ("given", "first", "said"),
    [
        ({"saving_ns": 7e6}, True, "Saves about 7.00 ms of a step"),
        ({"saving_ns": 7e6, "counted_ns": 3e6}, False,
         "Saves about 7.00 ms of a step; about 3.00 ms after the changes above"),
        ({"saving_ns": 7e6, "counted_ns": 3e6}, True, "Saves about 7.00 ms of a step"),
        ({"counted_ns": 3e6}, True, "Saves about 3.00 ms together with the other changes"),
        ({"saving_ns": 7e6, "saving_bytes": 2**30}, False, "Saves about 7.00 ms of a step and 1.00 GiB of the peak"),
    ],
)  # fmt: skip
def test_page_and_markdown_say_the_same_of_a_saving(given, first, said):
    one = finding(**given)
    found = Report(parts=(advised(*((one,) if first else (finding(saving_ns=9e6), one))),))
    assert f'<p class="saves">{said} <span' in html_report(found)
    assert f"** {said} (predicted)." in markdown_report(found)


def test_the_first_finding_speaks_of_none_above():
    page = html_report(Report(parts=(advised(finding(saving_ns=7.32e6, counted_ns=36e6)),)))
    assert "Saves about 7.32 ms of a step alone; about 36.0 ms together with the other changes" in page
    assert "above" not in re.findall(r'class="saves">([^<]*)', page)[0]


def test_findings_of_one_rule_have_ids_of_their_own():
    page = html_report(Report(parts=(advised(*(finding(saving_ns=1e6) for _ in range(3))),)))
    assert max(Counter(ids(page)).values()) == 1
    assert {"finding-r", "finding-r--2", "finding-r--3"} <= set(ids(page))


def test_a_page_over_several_says_whose_verdict_heads_it():
    both = (replace(advised(), name="mine"), replace(advised(), name="yours", waterfall=None))
    assert '<span id="about">mine</span> ' in html_report(Report(parts=both))


def test_a_part_of_another_version_is_drawn_in_no_colour_of_ours():
    found = waterfall()
    parts = (*found.parts[:-1], msgspec.structs.replace(found.parts[-1], name="of tomorrow" * 100))
    spec = waterfall_chart(msgspec.structs.replace(found, parts=parts), "").to_dict()
    scale = spec["layer"][0]["encoding"]["color"]["scale"]
    assert dict(zip(scale["domain"], scale["range"], strict=True))[parts[-1].name[:119] + "…"] == NEUTRAL


def test_provenance_is_neither_measured_nor_specified():
    section = provenance(advised())
    assert section.blocks[0].how == ""
    assert "**Provenance**" in markdown_report(Report(parts=(advised(),)))


def test_no_folder_is_in_a_command(tmp_path):
    stored = tmp_path / "run"
    shutil.copytree(RUNS / "launch-bound", stored)
    header = json.loads((stored / "run.json").read_text())
    (stored / "run.json").write_text(json.dumps(header | {"command": "flopwise sweep /home/me/secret/s.toml"}))
    for suffix in (".html", ".md"):
        typed = f"flopwise report {stored} --runs=/home/me/runs -o ~/pages/r{suffix}"
        text = report(stored, output=tmp_path / f"r{suffix}", command=typed).read_text()
        assert f"flopwise report run --runs=runs -o r{suffix}" in text
        assert "flopwise sweep s.toml" in text
        assert str(tmp_path) not in text
        assert "secret" not in text


def test_pictures_for_a_page_are_said_to_be_no_option(tmp_path):
    page = tmp_path / "r.html"
    done = CliRunner().invoke(command, [str(RUNS / "launch-bound"), "-o", str(page), "--pictures"])
    assert done.exit_code == 0
    assert done.stderr.strip() == "--pictures is for .md: the page draws its charts itself"


def test_points_that_differ_in_much_are_told_by_what_tells_them_apart():
    points = [point for point in StoredRun.load(TUNED / "small-4x512").points if point.phases]
    labels = labels_of(points)
    assert len(set(labels)) == len(points) == 14
    assert labels[1:4] == ["2. as 1 again", "3. as 1 with graph=on", "4. as 3 with precision=bf16"]
    assert not [label for label in labels[1:] if label.endswith("…") and len(label) < 60]


def test_a_legend_has_no_colour_twice():
    points = [point for point in StoredRun.load(RUNS / "prediction").points if point.phases]
    axis, rows = sweep_rows(points)
    scale = sweep_chart(axis, rows, "wall_ms").to_dict()["layer"][-1]["encoding"]["color"]["scale"]
    assert scale["domain"] == ["small", "medium", "large", "xl", "2.7B"]
    assert len({row["series"] for row in rows}) > len(scale["range"]) >= len(scale["domain"])


def test_names_of_dots_do_not_lie_upon_each_other():
    close = [{"name": f"lever{i}=on", "predicted_ms": 0.1 * i, "measured_ms": 0.1} for i in range(8)]
    far = {"name": "graph=on", "predicted_ms": 30.0, "measured_ms": 29.0}
    spec = predicted_measured_chart([*close, far]).to_dict()
    named = [row["name"] for layer in spec["layer"][2:] for row in layer["data"]["values"]]
    assert "graph=on" in named
    assert 2 <= len(named) < 5


def test_a_title_names_no_setting_without_a_value(tmp_path):
    assert "impl=," not in report(RUNS / "course-attention", output=tmp_path / "r.md").read_text()
