"""Every table of every view, on terminals of 80 to 160 columns: no line too long, every row there, and with its key."""

import io
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from flopwise.api.account import account
from flopwise.api.compare import compare
from flopwise.api.course import course
from flopwise.api.explain import explain
from flopwise.api.plan import plan
from flopwise.api.report import gather
from flopwise.api.roofline import roofline
from flopwise.api.runs import stored_result
from flopwise.capture.doctor import GOOD, Check
from flopwise.predict.datasheet import from_datasheet
from flopwise.render.comparison_view import comparison_view
from flopwise.render.explain_view import changes_view, explanations_view
from flopwise.render.findings_view import findings_view
from flopwise.render.machine_view import ceilings_view, doctor_view
from flopwise.render.report.evidence import TableBlock
from flopwise.render.report.sections import sections, side_by_side
from flopwise.render.runs_view import runs_view
from flopwise.render.table import shown
from flopwise.render.terminal import text
from flopwise.render.views import view_of
from flopwise.spec.gpu import gpu
from flopwise.store import StoredRun, list_runs

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "trace" / "fixtures"
NAIVE, COMPILED = (TRACES / f"h200-small-{name}-2steps.kineto.json.gz" for name in ("fp32-naive", "bf16-compiled"))
RUNS = ROOT / "benchmarks" / "results" / "h200-2026-11"
TUNED = ROOT / "benchmarks" / "results" / "h200-2026-11-tune-final"


def explained():
    return [explain(path) for path in (NAIVE, COMPILED)]


def stored(name, root=RUNS):
    return lambda: view_of(stored_result(root / name)).tables


def one_point():
    run = StoredRun.load(RUNS / "launch-bound")
    return view_of(msgspec.structs.replace(run, points=run.points[:1])).tables


def compared():
    found = compare(RUNS / "course-end-to-end", RUNS / "course-end-to-end")
    return comparison_view(found).tables


def reported():
    parts = [gather(NAIVE), gather(COMPILED), gather(RUNS / "launch-bound")]
    found = [side_by_side(parts), *(section for part in parts for section in sections(part))]
    return [block.table for section in found for block in section.blocks if isinstance(block, TableBlock)]


CHECKS = [Check(name="torch", state=GOOD, found="2.13 " * 40, advice="nothing to do " * 20)]
VIEWS = {
    "explain": lambda: [table for one in explained() for table in view_of(one).tables],
    "explain several": lambda: explanations_view(explained()).tables,
    "explain against": lambda: changes_view(*explained()).tables,
    "course": lambda: view_of(course([NAIVE, COMPILED])).tables,
    "roofline of a trace": lambda: view_of(roofline(NAIVE)).tables,
    "roofline of a workload": lambda: view_of(roofline("small", gpu="h200")).tables,
    "account": lambda: view_of(account("small", gpu="h100,h200", tokens=1e12, measured_ns=10**8)).tables,
    "plan": lambda: view_of(plan("llama3-8b", gpu="h100", gpus=64, tokens=1e12, price=2.0)).tables,
    "account of inference": lambda: view_of(account("gpt2", gpu="h100,h200", inference=True)).tables,
    "memory": lambda: view_of(gather(RUNS / "prediction-memory").run).tables,
    "one point": one_point,
    "two in turns": stored("overlap-medium"),
    "sweep": stored("course-attention"),
    "large sweep": stored("prediction"),
    "tuning": stored("small-4x512", TUNED),
    "lab": stored("lab"),
    "compare": compared,
    "ceilings": lambda: ceilings_view(from_datasheet(gpu("h200"))).tables,
    "doctor": lambda: doctor_view(CHECKS).tables,
    "runs": lambda: runs_view(list_runs(RUNS), RUNS).tables,
    "report": reported,
}


def lines_at(table, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    return [Text.from_ansi(line) for line in text(table, console).splitlines()]


@pytest.fixture(scope="module")
def tables(request):
    return VIEWS[request.param]()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("tables", VIEWS, indirect=True)
def test_every_table_fits_with_all_its_rows_and_their_keys(tables, width):
    assert tables
    for table in tables:
        lines = lines_at(table, width)
        assert max(line.cell_len for line in lines) <= width, table.title
        cells = shown(table).cells
        place = 0
        for key in [row[0] for row in cells if row and row[0].split()] if len(cells) > 1 else []:
            word = key.split()[0][:10]
            begins = [i for i, line in enumerate(lines[place:], place) if line.plain.strip().startswith(word)]
            assert begins, (table.title, key)
            place = begins[0] + 1


def test_a_change_stands_beside_its_finding_at_any_width():
    """A past defect: at 120 columns the change stood in another block, below all findings."""
    found = explain(NAIVE)
    table = findings_view(found.findings, found.step_ns).tables[0]
    for width in (80, 100, 120, 160):
        lines = [line.plain for line in lines_at(table, width)]
        starts = [i for i, line in enumerate(lines) if line.split(" ")[0].isdigit()] + [len(lines)]
        assert len(starts) == len(found.findings) + 1
        for one, (begin, end) in zip(found.findings, pairwise(starts), strict=True):
            block = " ".join(lines[begin:end])
            assert all(f"--{lever}" in block and value in block for lever, value in one.levers.items())
            assert f"{one.counted_ns / 1e6:.3g}"[:3] in block
