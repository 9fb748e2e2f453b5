"""The closed form against what was measured on an H200 (benchmarks/results): every eager step of the reference model."""

from pathlib import Path

import pytest

from flopwise.cost.step import account_step
from flopwise.spec.gpu import gpu
from flopwise.spec.model import ModelSpec
from flopwise.store import StoredRun

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11"


def measured_points():
    found = {}
    for run in sorted(path.parent for path in RESULTS.glob("*/points.jsonl")):
        for point in StoredRun.load(run).points:
            w = point.trial.workload
            if (
                point.memory
                and isinstance(w.subject, ModelSpec)
                and w.recipe.compile == "off"
                and w.recipe.graph == "off"
            ):
                found[w.label()] = point
    return found


POINTS = measured_points()


def test_there_is_something_to_compare_with():
    assert len(POINTS) >= 20


@pytest.mark.parametrize("label", POINTS)
def test_the_peak_is_within_two_percent_of_the_measured(label):
    point = POINTS[label]
    told = {p.phase: p for p in account_step(point.trial.workload, gpu("h200")).phases}
    for memory in point.memory:
        assert told[memory.phase].peak_bytes == pytest.approx(memory.peak_bytes, rel=0.025), memory.phase
    peak = max(m.peak_bytes for m in point.memory)
    assert max(p.peak_bytes for p in told.values()) == pytest.approx(peak, rel=0.02)
    assert point.ran.parameters == point.trial.workload.subject.parameters()
