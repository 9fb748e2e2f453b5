"""The power cap: a step explains itself, and less work bound by memory saves less than its own time."""

import msgspec
import pytest

from flopwise.advice.power import slowed, strength
from flopwise.advice.predicted import predicted_change
from flopwise.analysis.clocks import CAP, held_clock
from flopwise.predict.step_time import StepTime
from flopwise.records.run import Telemetry

from .made import MS, known, point

LOW = Telemetry(sm_mhz=(1980, 1980, 1980, 1600), power_mw=(120_000, 300_000, 500_000, 699_000), throttle=(CAP,))


def step(matmul, other):
    kinds = {"matmul": matmul * MS, "elementwise": other * MS}
    clocks = {"wall_ns": (matmul + other) * MS, "gpu_ns": (matmul + other) * MS, "host_ns": 0.0}
    return StepTime(how="", bound="", phases=(), gpu_ns_by_kind=kinds, gpu_ns_by_bound={}, **clocks)


@pytest.mark.parametrize("measured", [101.0, 110.0, 130.0])
def test_a_step_explains_itself(measured):
    time = step(80, 20)
    assert slowed(time, strength(time, measured * MS)).wall_ns == pytest.approx(measured * MS)


def test_a_step_that_is_not_slower_than_its_model_has_none():
    time = step(80, 20)
    assert strength(time, 99 * MS) is None
    assert strength(time, 1000 * MS) is None  # no cap does that
    assert slowed(time, None) is time
    assert strength(step(0, 20), 30 * MS) is None


def test_without_other_work_the_matmuls_are_slower_still():
    found = strength(step(80, 40), 130 * MS)
    before, after = slowed(step(80, 40), found), slowed(step(80, 10), found)
    assert after.gpu_ns_by_kind["matmul"] > before.gpu_ns_by_kind["matmul"]
    assert 0 < before.wall_ns - after.wall_ns < 30 * MS
    assert before.gpu_ns_by_kind["elementwise"] == 40 * MS


def test_the_clock_does_not_rise_above_that_of_the_ceilings():
    found = strength(step(80, 20), 101 * MS)
    assert slowed(step(80, 800), found).wall_ns == pytest.approx(880 * MS)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (LOW, True),
        (None, False),
        (Telemetry(throttle=(CAP,)), False),
        (Telemetry(throttle=(CAP,), sm_mhz=(1600,)), False),
        (msgspec.structs.replace(LOW, throttle=("thermal",)), False),
        (msgspec.structs.replace(LOW, sm_mhz=(1980, 1980, 1980, 1965)), False),  # for a moment
    ],
)
def test_the_clock_of_the_busiest_moments_says_whether_it_is_capped(seen, expected):
    assert (held_clock(seen) is not None) is expected


def test_a_capped_step_is_predicted_to_gain_less_from_less_memory_traffic():
    options = {"batch": 16, "context": 1024, "precision": "bf16", "norm": "eager", "set": {"n_layers": 4}}
    facts = known("2.7B", **options)
    wall = 1.06 * predicted_change(facts, {}).now.wall_ns
    slow = point("2.7B", wall=wall, launch=0.2 * wall, busy=wall, **options)
    saved = {}
    for telemetry in (None, LOW):
        seen = msgspec.structs.replace(facts, point=msgspec.structs.replace(slow, telemetry=telemetry))
        found = predicted_change(seen, {"norm": "triton"})
        assert ("power cap" in found.arithmetic) is (telemetry is LOW)
        assert found.now.wall_ns * 0.99 < wall < found.now.wall_ns * 1.07
        saved[telemetry] = found.saving_ns
    assert 0.6 * saved[None] < saved[LOW] < 0.95 * saved[None]
