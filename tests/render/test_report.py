"""The report as data: what heads it, what it holds, what is escaped, and that it stays small however large the trace."""

import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from flopwise import units
from flopwise.analysis.step_timeline import LAUNCHES, PIXELS, step_timeline
from flopwise.analysis.traced_steps import traced_steps
from flopwise.api.report import gather, report
from flopwise.records.tuning import Attempt, Begun, Ended, Tuning
from flopwise.render.explain_screen import explanation_screen
from flopwise.render.explain_view import explanation_view
from flopwise.render.report import Report, ReportPart, html_report, markdown_report
from flopwise.render.report.overview import overview
from flopwise.render.report.sections import MOST_KERNELS, sections
from flopwise.render.step_charts import icicle_parts, icicle_rows
from flopwise.render.terminal import text
from flopwise.spec.workload import workload
from flopwise.trace.read import read_trace

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))
from report_pages import COMPILED, HOSTILE, NAIVE, findings, gathered, hostile_trace, waterfall

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11"


@pytest.fixture(scope="module")
def part():
    return gathered(NAIVE)


@pytest.fixture(scope="module")
def page(part):
    return html_report(Report(parts=(part,), command="flopwise report trace.json.gz"))


class Tags(HTMLParser):
    """The tags, and what lies in the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self._in = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self._in = tag

    def handle_data(self, data):
        if self._in == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self._in = ""


def verdict(part):
    return overview(part).verdict


def test_the_page_begins_with_what_the_screen_says():
    found = gather(NAIVE)
    first, screen = overview(found), explanation_screen(found.explanation)
    assert first.verdict == screen.verdict
    assert [one.label.lower() for one in first.numbers] == [one.name for one in screen.figures] == [
        "now", "reachable", "limit",
    ]  # fmt: skip
    assert [one.value for one in first.numbers] == [units.duration(one.amount) for one in screen.figures]
    assert [(one.title, one.line) for one in first.changes] == [(one.what, one.line) for one in screen.changes]
    pairs = zip(screen.changes, first.changes, strict=True)
    assert all(units.duration(one.saving) in change.saves for one, change in pairs)
    said = "".join(text(table) for table in explanation_view(found.explanation).tables)
    assert f"reachable {first.numbers[1].value}, with all 5 changes found (predicted)" in said


def test_a_target_of_each_kind_has_a_verdict():
    assert verdict(gather(COMPILED)).startswith("Launch-bound: the GPU is idle 62 % of the step")
    assert verdict(gather(RUNS / "launch-bound")).startswith("4 points measured: from 6.37 ms")


def test_a_tuning_is_told_by_what_was_kept(part):
    def attempt(lever, value, kept=False, **times):
        return Attempt(lever=lever, value=value, before="off", status="ok", kept=kept, why="said", **times)

    faster = {"predicted_ns": 17e6, "before_ns": 24e6, "after_ns": 7e6}
    tried = (
        attempt("compile", "blocks", kept=True, **faster),
        attempt("compile", "default", kept=True, predicted_ns=1e5, before_ns=7e6, after_ns=6.9e6),
        attempt("optimizer", "fused", predicted_ns=1e5, before_ns=7e6, after_ns=7.1e6),
    )
    begun = Begun(workload=workload("tiny"), step_ns=24e6)
    ended = Ended(workload=workload("tiny", compile="default"), step_ns=7e6, stopped="the budget is spent")
    tuning = Tuning(run="x", begun=begun, attempts=tried, ended=ended)
    tuned = ReportPart(name="tune tiny", waterfall=waterfall(), findings=part.findings, tuning=tuning)
    assert verdict(tuned).startswith("3.43 times as fast: 24.0 ms → 7.00 ms; 2 of 3 attempts kept.")
    none = replace(tuned, tuning=Tuning(run="x", begun=begun, attempts=tried[2:], ended=None))
    assert verdict(none) == (
        "Nothing that was tried was kept. optimizer = fused: said. It was stopped before its end, or still runs."
    )
    found = sections(tuned)
    assert [section.title for section in found[:3]] == [
        "The recipe", "What was tried", "Findings before anything was changed",
    ]  # fmt: skip
    tags = Tags(html_report(Report(parts=(tuned,))))
    charts = json.loads(tags.scripts[0])
    assert {"staircase", "predicted-measured"} <= set(charts)
    again = replace(tuned, tuning=Tuning(run="x", begun=begun, attempts=(*tried, *tried), ended=ended))
    drawn = json.dumps(json.loads(Tags(html_report(Report(parts=(again,)))).scripts[0])["staircase"])
    assert "compile=blocks, try 2" in drawn


def test_the_page_fetches_nothing_and_runs_only_what_its_policy_names(page):
    tags = Tags(page)
    policy = next(value for tag, name, value in tags.attributes if name == "content" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    addresses = [v for _, name, v in tags.attributes if name in ("src", "href", "action", "data", "srcset")]
    assert all(address.startswith("#") for address in addresses)
    assert not [name for _, name, _ in tags.attributes if name.startswith("on") or name == "style"]
    assert tags.tags.count("script") == 3


def test_every_number_says_how_it_was_obtained(page):
    shown = len(re.findall(r"<table id=|<figure>", page))
    assert len(re.findall(r'class="how (measured|predicted|specified)"', page)) >= shown


def test_hostile_names_are_text_in_the_page(tmp_path):
    evil = gathered(hostile_trace(tmp_path / "t.json"), HOSTILE, HOSTILE)
    text = html_report(Report(parts=(evil,), command=HOSTILE))
    tags = Tags(text)
    assert "img" not in tags.tags
    assert tags.tags.count("script") == 3
    specs = json.loads(tags.scripts[0])  # the data is whole, and nothing in it ended its element
    assert "</script><img" in str(specs["gpu-time"])
    assert "\u202e" not in text


def test_hostile_names_are_text_in_markdown(tmp_path):
    evil = gathered(hostile_trace(tmp_path / "t.json"), HOSTILE, HOSTILE)
    text = markdown_report(Report(parts=(evil,), command=HOSTILE))
    outside = re.sub(r"`+ .*? `+", "", text)  # a span of code is text
    assert not re.search(r"<(?!/?(details|summary|sub)>)", outside)
    assert "](javascript" not in outside.replace("\\](javascript", "")
    assert "\u202e" not in text


def test_markdown_holds_the_verdict_the_findings_and_folded_evidence(part):
    text = markdown_report(Report(parts=(part,), command="flopwise report"))
    assert "**GPU-bound: the GPU is busy 93 % of the step.**" in text
    assert "1. **The GPU waits for the CPU: late launches** Saves about 17.0 ms of a step (predicted)." in text
    assert text.count("<details>") == text.count("</details>") >= 4
    assert len(text) < 65_536  # what a comment on GitHub holds


def test_parts_of_the_icicle_fill_what_is_above_them(part):
    rows = icicle_rows(part.explanation.phase_class_modules)
    for level in (0, 1, 2):
        total = sum(row["ms"] for row in rows if row["y0"] == level)
        assert total == pytest.approx(part.explanation.gpu_ns / 1e6, rel=1e-9)


def test_the_timeline_has_as_many_pieces_as_a_screen_and_loses_no_time():
    part = traced_steps(read_trace(NAIVE))
    fine, coarse = step_timeline(part), step_timeline(part, pixels=50)
    assert len(coarse.spans) < len(fine.spans) <= 2 * PIXELS * len(fine.lanes)

    def spent(found):
        return sum(span.busy_ns for span in found.spans if span.lane.startswith("stream"))

    def pieces(found):
        return sum(span.count for span in found.spans if span.lane.startswith("stream"))

    assert (spent(fine), pieces(fine)) == (spent(coarse), pieces(coarse))
    assert fine.lanes[0] == LAUNCHES
    assert 0.3 < sum(cell.idle for cell in fine.idle) / len(fine.idle) < 0.7  # as `explain` says: about half


def test_a_page_stays_small_whatever_the_trace_holds(part):
    kernel = part.explanation.kernels[0]
    many = tuple(msgspec.structs.replace(kernel, name=f"{kernel.name}<{i}>" * 20) for i in range(20_000))
    large = ReportPart(
        name="large", explanation=msgspec.structs.replace(part.explanation, kernels=many), waterfall=waterfall(),
        findings=findings(many[5].name), timeline=part.timeline,
    )  # fmt: skip
    text = html_report(Report(parts=(large,)))
    assert len(text) < 5e6
    assert text.count('<tr id="kernel-') == MOST_KERNELS
    assert 'href="#kernel-6"' in text


def test_files_are_written_whole_and_pictures_beside_markdown(tmp_path):
    place = report(RUNS / "launch-bound", output=tmp_path / "r.md", pictures=True)
    links = re.findall(r"\]\((r\.pictures/[\w-]+\.svg)\)", place.read_text())
    assert links
    assert all((tmp_path / link).is_file() for link in links)


def test_a_step_on_a_known_gpu_is_set_beside_its_prediction():
    found = gather(RUNS / "launch-bound").predictions
    assert [one.name for one in found] == [f"compile={c} graph={g}" for c in ("off", "default") for g in ("off", "on")]
    assert all(abs(one.error) < 0.5 for one in found)
    assert gather(RUNS / "course-attention").predictions == ()  # operations are not accounted for


def test_traces_are_set_side_by_side_and_a_single_one_is_not(part):
    both = Report(parts=(part, gather(COMPILED)))
    assert markdown_report(both).index("Side by side") < markdown_report(both).index("## ")
    assert "Side by side" not in markdown_report(Report(parts=(part,)))


def test_parts_to_go_into_are_where_their_boxes_are(part):
    modules = part.explanation.phase_class_modules
    boxes = {(row["x0"], row["x1"]) for row in icicle_rows(modules)}
    listed = icicle_parts(modules)
    assert len(listed) > 5
    assert {(x0, x1) for _, x0, x1 in listed} <= boxes


def test_a_run_shows_no_file_from_outside_itself(tmp_path):
    stored = tmp_path / "run"
    shutil.copytree(RUNS / "launch-bound", stored)
    rows = [json.loads(line) for line in (stored / "points.jsonl").read_text().splitlines()]
    rows[0]["trace_file"] = str(COMPILED.resolve())
    (stored / "points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gather(stored).explanation is None
