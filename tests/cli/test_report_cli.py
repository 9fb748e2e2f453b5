"""`flopwise report` and `compare --format github` as typed."""

import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILED = HERE.parent / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"
RUNS = HERE.parents[1] / "benchmarks" / "results" / "h200-2026-11"


def test_a_page_and_a_comment(run, tmp_path):
    assert run("report", COMPILED, "-o", "page.html")[:2] == (0, "page.html\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert run("report", COMPILED, "-o", "page.md")[0] == 0
    assert (tmp_path / "page.md").read_text().startswith("## h200-small-bf16-compiled-2steps.kineto.json.gz")


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (("report", "nowhere"), "nowhere", "runs"),
        (("report", COMPILED, "-o", "page.pdf"), "names no report", ".html"),
        (("report", COMPILED, "-o", "no/such/page.html"), "no such folder", "make the folder"),
    ],
)
def test_one_line_and_a_hint(run, words, what, hint):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert what in err
    assert hint in err


def test_a_trace_is_not_written_over(run, tmp_path):
    given = tmp_path / "step.json.gz"
    shutil.copyfile(COMPILED, given)
    before = given.read_bytes()
    assert run("report", given, "-o", given)[0] == 2
    assert given.read_bytes() == before


def test_annotations_for_a_pull_request(run):
    runs = RUNS / "launch-bound"
    code, out, _ = run("compare", runs, runs, "--format", "github")
    lines = out.splitlines()
    assert code in (0, 3)
    assert len(lines) == 4
    assert all(
        line.startswith(("::notice title=flopwise compare::", "::warning title=flopwise compare::")) for line in lines
    )


def test_annotations_of_a_failed_gate():
    from types import SimpleNamespace

    from flopwise.analysis.matching import Compared
    from flopwise.records.comparison import SLOWER, Comparison
    from flopwise.render.comparison_view import annotations

    trial = SimpleNamespace(workload=SimpleNamespace(label=lambda: "tiny\n::error::b4 50%"))
    point = SimpleNamespace(trial=trial, environment=None)
    slower = Comparison(
        ratio=1.2, low=1.1, high=1.3, verdict=SLOWER, reason="", n_a=9, n_b=9, paired=False, drift=0.0
    )  # fmt: skip
    text = annotations(Compared(((point, point, slower),)), 0.03)
    assert text.startswith(
        "::error title=flopwise compare::tiny␊::error::b4 50%25: B is slower, B takes 1.200 times A's time"
    )
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("verdict", "level", "said"),
    [
        ("faster", "notice", "tiny: B is faster, B takes 1.010 times"),
        ("no difference shown", "notice", "tiny: no difference is shown, B takes 1.010 times"),
        ("inconclusive", "warning", "tiny: the comparison is inconclusive, B takes 1.010 times"),
    ],
)
def test_annotations_are_sentences(verdict, level, said):
    from types import SimpleNamespace

    from flopwise.analysis.matching import Compared
    from flopwise.records.comparison import Comparison
    from flopwise.render.comparison_view import annotations

    point = SimpleNamespace(trial=SimpleNamespace(workload=SimpleNamespace(label=lambda: "tiny")), environment=None)
    c = Comparison(ratio=1.01, low=1.0, high=1.02, verdict=verdict, reason="", n_a=9, n_b=9, paired=False, drift=0.0)
    assert annotations(Compared(((point, point, c),)), None).startswith(
        f"::{level} title=flopwise compare::{said} A's time"
    )


def test_compare_tells_all_its_formats(run):
    assert "markdown|github" in run("compare", "--help")[1]
    code, _, err = run("compare", "a", "b", "--format", "xml")
    assert code == 2
    assert "allowed: table, json, csv, markdown, github" in err
