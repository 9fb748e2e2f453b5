"""A compiled step's kernels against the traces of real ones: what is left beside matmuls, attention and the optimizer.

What sums over columns take was chosen by these traces: this keeps the model where it is, and does not show that it is right.
"""

from pathlib import Path

import pytest

from flopwise.analysis.explanation import explain_trace
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.spec.gpu import gpu
from flopwise.store import StoredRun
from flopwise.store.ceilings import VARIABLE, load_ceilings
from flopwise.store.tuning import read_tuning
from flopwise.trace.read import read_trace
from flopwise.work.operation import ATTENTION, MATMUL, OPTIMIZER

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
APART = (MATMUL, ATTENTION, OPTIMIZER)


@pytest.mark.parametrize("run", ["small-16x1024", "large-16x1024"])
def test_fused_kernels_still_take_about_what_the_model_says(run, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(RESULTS / "ceilings-2026-11-again"))
    folder = RESULTS / "h200-2026-11-tune-final" / run
    best = read_tuning(StoredRun.load(folder)).best
    seen = explain_trace(read_trace(folder / "traces" / "after.kineto.json.gz"))
    measured = sum(share.gpu_ns for share in seen.classes if share.name not in APART)
    h200 = gpu("h200")
    predicted = predict(best, Machine(gpu=h200)).time_with(load_ceilings(h200.name)).gpu_ns_by_kind
    assert sum(ns for kind, ns in predicted.items() if kind not in APART) == pytest.approx(measured, rel=0.15)
