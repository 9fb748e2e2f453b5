"""Fitted numbers have one home with their sources, and the pages that quote one quote it as it is."""

import ast
import inspect
import json
import re
from pathlib import Path
from statistics import median

import msgspec
import pytest

from flopwise import predict, units
from flopwise.predict import constants
from flopwise.predict.account import account_for
from flopwise.predict.machine import machine_with
from flopwise.predict.op_time import _miss, op_time
from flopwise.records.ceilings import Ceilings
from flopwise.render.account_view import account_view
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload
from flopwise.work.operation import MATMUL, OpWork

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IN_WORDS = {0.2: "a fifth", 0.25: "a quarter", 0.5: "half"}
SOLVER = {("calibration", "_STEPS")}  # how a fit is searched for, not what was fitted


@pytest.mark.parametrize(
    ("page", "share"),
    [
        ("docs/explanation/accounting.md", IN_WORDS[constants.OVERLAP_SHARE]),
        ("docs/reference/findings.md", str(constants.OVERLAP_SHARE)),
    ],
)
def test_pages_say_of_an_overlapped_optimizer_what_is_predicted(page, share):
    """A past disagreement: 0.2 in the code, 'half' in a rule's docstring and the page that is made from it."""
    text = " ".join((ROOT / page).read_text().split())
    assert f"{share} of the smaller of two: the optimizer's time" in text


def test_the_launch_cost_that_a_table_names_is_the_constant():
    tables, _ = account_view(account_for(workload("tiny"), (machine_with(gpu("h200")),)))
    notes = " ".join(note for table in tables for note in table.notes)
    assert f"a CPU that needs {units.duration(constants.HOST['forward'].op_ns)} to launch" in notes


def test_the_results_that_the_constants_name_are_there():
    source, results = inspect.getsource(constants), ROOT / "benchmarks" / "results"
    paths = re.findall(r"(?:benchmarks|tests)/[\w./-]+\w", source)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    named = set(re.findall(r"\b(?:h200|ceilings|prediction-time)-2026-11[\w./-]*\w", source))
    assert len(named) >= 3
    assert [name for name in named if not (results / name).exists()] == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_products_measured_nearby_correct_those_that_are_left_out(dtype):
    kept = msgspec.json.decode((ROOT / "benchmarks/results/ceilings-2026-11/h200.json").read_bytes(), type=Ceilings)
    near = kept.matmul[dtype].near
    left = [abs(one.miss - _miss(one.shape, near[:n] + near[n + 1 :])) for n, one in enumerate(near)]
    assert median(left) < 0.8 * median(abs(one.miss) for one in near)


def test_no_other_file_that_predicts_holds_a_fitted_float():
    found = set()
    for path in Path(next(iter(predict.__path__))).glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            floats = [one for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, float)]
            if isinstance(node, ast.Assign) and floats and path.stem != "constants":
                found |= {(path.stem, target.id) for target in node.targets if isinstance(target, ast.Name)}
    assert found == SOLVER


def test_unaligned_products_are_as_slow_as_the_lab_measured():
    """Squares of odd sides, which the shares were not taken from; aligned ones, which the ceilings were not taken from."""
    limits = msgspec.json.decode((RESULTS / "ceilings-2026-11" / "h200.json").read_bytes(), type=Ceilings)
    lab = (RESULTS / "h200-2026-11" / "lab" / "lab.jsonl").read_text().splitlines()
    rows = next(row for row in map(json.loads, lab) if row.get("experiment") == "tile-quantization")["rows"]
    squares = {row["n"]: row["device_ns"] for row in rows if row["part"] == "waves" and row["how"] == "library"}
    found = {}
    for n in squares:
        op = OpWork(
            op="mm", module="", phase="forward", kind=MATMUL, dtype="bf16", flops=2 * n**3, shapes=((n, n),) * 2
        )
        found[n] = op_time(op, limits).ns / squares[n] - 1
    odd = [abs(off) for n, off in found.items() if n % 2]
    assert len(odd) == 3
    assert max(odd) < 0.1
    assert median([abs(off) for n, off in found.items() if n % 8 == 0]) < 0.08
    assert max(abs(off) for off in found.values()) < 0.2
