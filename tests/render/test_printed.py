"""A result prints as the command line does, is one line as `repr`, and has HTML for notebooks."""

import html
import subprocess
import sys
from pathlib import Path

import pytest

import flopwise
from flopwise.analysis.measured import MeasuredRun
from flopwise.predict.machine import find_ceilings
from flopwise.records.printed import Printed
from flopwise.render.screen import LINES
from flopwise.render.views import screen_of
from flopwise.spec.gpu import gpu
from flopwise.store.tuning import read_tuning

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "trace" / "fixtures"
COMPILED = TRACES / "h200-small-bf16-compiled-2steps.kineto.json.gz"
RESULTS = ROOT / "benchmarks" / "results"
RUNS = RESULTS / "h200-2026-11"
TUNED = RESULTS / "h200-2026-11-tune-final" / "small-4x512"
# What Python returns, and the command line that answers the same.
ALIKE = {
    "explain": (lambda: flopwise.explain(COMPILED), ["explain", COMPILED]),
    "explain for another GPU": (lambda: flopwise.explain(COMPILED, gpu="h100"), ["explain", COMPILED, "--gpu", "h100"]),
    "course": (lambda: flopwise.course([COMPILED]), ["course", COMPILED]),
    "account": (lambda: flopwise.account("small"), ["account", "small"]),
    "plan": (
        lambda: flopwise.plan("llama3-8b", gpu="h100", gpus=8),
        ["plan", "llama3-8b", "--gpu", "h100", "--gpus", "8"],
    ),
    "account for a GPU": (lambda: flopwise.account("small", gpu="h200"), ["account", "small", "--gpu", "h200"]),
    "compare": (
        lambda: flopwise.compare(RUNS / "launch-bound", RUNS / "launch-bound"),
        ["compare", RUNS / "launch-bound", RUNS / "launch-bound"],
    ),
    "compare by a clock": (
        lambda: flopwise.compare(RUNS / "launch-bound", RUNS / "launch-bound", clock="gpu"),
        ["compare", RUNS / "launch-bound", RUNS / "launch-bound", "--clock", "gpu"],
    ),
    "roofline": (lambda: flopwise.roofline("small", gpu="h200"), ["roofline", "small", "--gpu", "h200"]),
    "a run of several": (lambda: MeasuredRun.load(RUNS / "launch-bound"), ["runs", "show", RUNS / "launch-bound"]),
}
SCREENS = {
    "tune": lambda: read_tuning(TUNED),
    "a run of one": lambda: MeasuredRun.load(RUNS / "launch-bound").each[0],
    "explain": ALIKE["explain"][0],
    "account": ALIKE["account"][0],
    "course": ALIKE["course"][0],
}
TABLES = {"compare": ALIKE["compare"][0], "ceilings": lambda: find_ceilings(gpu("h200"))}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ALIKE)
def test_it_prints_as_the_command_line_does(name, cli):
    make, words = ALIKE[name]
    assert f"{make()}\n" == cli(*words).stdout


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_comes_first_and_the_tables_are_folded_away(name):
    result = SCREENS[name]()
    assert screen_of(result) is not None
    assert len(str(result).splitlines()) <= LINES
    shown, _, tables = result._repr_html_().partition("<details>")
    assert shown == f"<pre>{html.escape(str(result))}\n</pre>"
    assert tables.count("<table>") == tables.count("</table>") > 0


@pytest.mark.parametrize("name", TABLES)
def test_what_has_no_screen_is_its_tables(name):
    result = TABLES[name]()
    assert screen_of(result) is None
    assert result._repr_html_().startswith("<table>")


@pytest.mark.parametrize("make", [*SCREENS.values(), *TABLES.values()])
def test_repr_is_one_short_line(make):
    result = make()
    assert repr(result).startswith(f"<{type(result).__name__}: ")
    assert "\n" not in repr(result)
    assert len(repr(result)) < 140


def test_every_result_says_what_it_is_of():
    kinds = Printed.__subclasses__()
    assert {"StoredRun", "Explanation", "Tuning", "Compared"} <= {kind.__name__ for kind in kinds}
    assert [kind.__name__ for kind in kinds if kind.headline is Printed.headline] == []


def test_nothing_heavy_is_imported_before_it_is_printed():
    code = "import sys, flopwise; print(sorted({'rich', 'polars', 'torch', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
