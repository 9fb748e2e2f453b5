"""What the clocks leave out, and when; the clocks themselves are tested on a GPU."""

from flopwise.capture.clock import _LONGEST_LAUNCH_NS, _Hold
from flopwise.capture.point_builder import PointBuilder
from flopwise.records.events import Done, PhaseSample, Sampled, StepBuilt
from flopwise.records.run import STEP
from flopwise.spec.workload import Sampling, Trial, workload


def test_the_gpu_is_held_longer_after_a_failure_and_never_for_what_no_queue_holds():
    hold = _Hold()
    first = hold.length_ns(1_000_000)
    hold.learn(False)
    assert hold.length_ns(1_000_000) > first > 1_000_000
    assert hold.length_ns(_LONGEST_LAUNCH_NS + 1) == 0
    hold.learn(False)
    hold.learn(False)
    assert hold.length_ns(1_000_000) == 0


def test_a_number_that_no_clock_shows_is_a_crash_row():
    """A past bug: a step that replaced the clocks left a row that could not be read again."""
    builder = PointBuilder(Trial(workload=workload("tiny"), sampling=Sampling()))
    builder.take(StepBuilt(setup_ns=-5))
    builder.take(Sampled(phases={STEP: PhaseSample(wall_ns=10, launch_ns=4)}))
    point = builder.point(Done(status="ok"))
    assert (point.status, point.phases) == ("crash", ())
    assert "setup_ns = -5 is impossible" in point.reason


def test_samples_without_details_add_to_the_step_alone():
    builder = PointBuilder(Trial(workload=workload("tiny"), sampling=Sampling()))
    whole = {
        STEP: PhaseSample(wall_ns=10, launch_ns=4, gpu_ns=8, held=True),
        "forward": PhaseSample(wall_ns=6, launch_ns=3, gpu_ns=5, held=True),
    }
    builder.take(Sampled(phases=whole))
    builder.take(Sampled(phases={STEP: PhaseSample(wall_ns=12, launch_ns=5)}))
    step, forward = builder.point(Done(status="ok")).phases
    assert (step.wall_ns, step.launch_ns, step.gpu_ns, step.gpu_held) == ((10, 12), (4, 5), (8,), (True,))
    assert (forward.wall_ns, forward.gpu_ns) == ((6,), (5,))
