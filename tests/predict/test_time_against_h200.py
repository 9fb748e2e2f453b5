"""Predicted step times against the held-out steps of an H200 (benchmarks/results), with ceilings measured in the same hour."""

from pathlib import Path
from statistics import median

import msgspec
import pytest

from flopwise.predict.calibration import ceilings
from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.records.ceilings import Probe
from flopwise.spec.gpu import gpu
from flopwise.store import StoredRun
from flopwise.store.ceilings import VARIABLE, load_ceilings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KEPT = RESULTS / "ceilings-2026-11"


@pytest.fixture(scope="module")
def limits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(KEPT))
        found = load_ceilings("h200")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def errors(limits):
    """By 'measured' and 'specified' ceilings: (of the step, of its GPU time, busy, held), case by case."""
    found = {"measured": [], "specified": []}
    for point in StoredRun.load(RESULTS / "h200-2026-11" / "prediction-held-out").points:
        times, w = point.times(), point.trial.workload
        wall_ns, gpu_ns = median(times.wall_ns), median(times.gpu_ns)
        step = predict(w, Machine(gpu=gpu("h200")))
        for by in (limits, from_datasheet(gpu("h200"))):
            told = step.time_with(by)
            of_step, of_gpu = abs(told.wall_ns / wall_ns - 1), abs(told.gpu_ns / gpu_ns - 1)
            found[by.how].append((of_step, of_gpu, gpu_ns > 0.9 * wall_ns, all(times.gpu_held)))
    assert len(found["measured"]) == 29
    return found


@pytest.mark.slow
def test_after_calibration_gpu_time_meets_both_aims(errors):
    held = [of_gpu for _, of_gpu, _, held in errors["measured"] if held]
    assert len(held) == 27
    assert median(held) < 0.04
    assert max(held) < 0.08


@pytest.mark.slow
def test_after_calibration_steps_that_the_gpu_sets_the_pace_of_meet_both_aims(errors):
    busy = [of_step for of_step, _, busy, _ in errors["measured"] if busy]
    assert len(busy) == 12
    assert median(busy) < 0.035
    assert max(busy) < 0.07


def test_launch_bound_steps_do_not_get_worse(errors):
    """The aims, 5 % and 15 %, are missed: a host's pace differs by half between samples of one step."""
    steps = [of_step for of_step, *_ in errors["measured"]]
    assert median(steps) < 0.055
    assert max(steps) < 0.28


def test_by_the_datasheet_the_median_meets_its_aim(errors):
    assert median(of_step for of_step, *_ in errors["specified"]) < 0.075
    assert median(of_gpu for _, of_gpu, _, held in errors["specified"] if held) < 0.06


def test_the_kept_ceilings_are_what_the_kept_probes_tell(limits):
    probes = msgspec.json.decode((KEPT / "probes.json").read_bytes(), type=list[Probe])
    assert len(probes) == 1080
    again = ceilings(probes, gpu="h200", processors=limits.processors, versions=limits.versions)
    assert again.matmul["bf16"].peak_flops == pytest.approx(limits.matmul["bf16"].peak_flops)
    for phase, cost in limits.host.items():
        assert again.host[phase].op_ns == pytest.approx(cost.op_ns)
    assert again.memory == limits.memory
