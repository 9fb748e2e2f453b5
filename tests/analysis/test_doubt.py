"""Why a point that is ok may mean little."""

import pytest
import torch

from analysis.points import make_point
from flopwise.analysis.loop_notes import CLOCK_TIMES, doubt
from flopwise.capture.clock import CpuClock, empty_step_ns
from flopwise.records.run import Ran


@pytest.mark.parametrize(("wall_ns", "said"), [(CLOCK_TIMES * 1000, True), (CLOCK_TIMES * 1000 + 1, False)])
def test_a_step_that_the_clock_cannot_tell_from_an_empty_one_is_flagged(wall_ns, said):
    assert ("too short for the clock" in doubt(make_point(wall=(wall_ns,) * 5, clock_ns=1000))) == said


def test_without_a_clock_or_samples_nothing_is_said():
    assert doubt(make_point(wall=(1,) * 5)) == ""
    assert doubt(make_point(wall=(), clock_ns=1000)) == ""


def test_both_doubts_are_said():
    point = make_point(wall=(5,) * 5, clock_ns=5, ran=Ran(device="cpu", bad_loss="nan"))
    assert "nan" in doubt(point)
    assert "too short" in doubt(point)


def test_an_empty_step_is_flagged_by_the_clock_that_timed_it():
    clock = CpuClock({"step": lambda: None})
    walls = tuple(clock.once() for _ in range(21))
    assert "too short" in doubt(make_point(wall=walls, clock_ns=empty_step_ns(torch.device("cpu"))))
