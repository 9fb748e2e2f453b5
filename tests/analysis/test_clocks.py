import pytest

from flopwise.analysis.clocks import compile_ns, summarise, tokens_per_second
from flopwise.records.run import PhaseTimes

from .points import make_point


@pytest.mark.parametrize(
    ("launch", "gpu", "held", "bound"),
    [
        (95, 30, True, "launch"),
        (95, 30, False, "launch"),  # even with its gaps the GPU's time is short
        (20, 95, True, "gpu"),
        (90, 90, True, "gpu"),
        (98, 82, True, "launch"),  # both fill the time, launching more of it
        (20, 95, False, "gpu"),  # the host was free early: no launch to wait for
        (95, 95, False, "mixed"),  # work or waiting: the clock cannot tell
        (30, 40, True, "host-sync"),
        (60, 40, True, "mixed"),  # first the host works, then the GPU
    ],
)
def test_what_dictates_the_time(launch: int, gpu: int, held: bool, bound: str) -> None:
    (step,) = summarise(make_point(wall=(100,) * 8, launch=(launch,) * 8, gpu=(gpu,) * 8, held=held))
    assert (step.bound, step.gpu_exact) == (bound, held)
    assert step.gpu_idle_share == pytest.approx(1 - gpu / 100)


@pytest.mark.parametrize(("n_held", "exact", "median"), [(8, True, 4), (4, True, 4), (3, False, 9)])
def test_samples_with_gaps_do_not_count_unless_they_are_most(n_held: int, exact: bool, median: int) -> None:
    held = (True,) * n_held + (False,) * (8 - n_held)
    gpu = tuple(4 if was_held else 9 for was_held in held)
    times = PhaseTimes(phase="step", wall_ns=(10,) * 8, launch_ns=(5,) * 8, gpu_ns=gpu, gpu_held=held)
    (step,) = summarise(make_point(phases=(times,)))
    assert step.gpu is not None
    assert (step.gpu_exact, step.gpu.median) == (exact, median)


def test_the_cpu_has_one_clock() -> None:
    (step,) = summarise(make_point(wall=(100, 110, 120, 100, 110, 120)))
    assert (step.launch, step.gpu, step.gpu_idle_share, step.gpu_exact, step.bound) == (None, None, None, False, "")
    assert step.wall.median == 110


def test_the_gpu_never_idles_less_than_nothing() -> None:
    (step,) = summarise(make_point(wall=(100,) * 6, launch=(10,) * 6, gpu=(101,) * 6))
    assert step.gpu_idle_share == 0


def test_phases_keep_their_order_and_a_failed_point_has_none() -> None:
    phases = tuple(PhaseTimes(phase=name, wall_ns=(5, 6)) for name in ("step", "forward", "backward"))
    empty = PhaseTimes(phase="optimizer", wall_ns=())
    assert [s.phase for s in summarise(make_point(phases=(*phases, empty)))] == ["step", "forward", "backward"]
    assert summarise(make_point(wall=(), status="oom")) == ()


def test_tokens_per_second_is_batch_times_context_over_the_step() -> None:
    point = make_point("tiny", wall=(500_000_000,) * 6, options={"batch": 2, "context": 64})
    assert tokens_per_second(point) == 256
    assert tokens_per_second(make_point("op:matmul")) is None
    assert tokens_per_second(make_point("tiny", wall=())) is None


def test_compile_time_is_the_first_warm_up_beyond_a_usual_step() -> None:
    compiled = {"compile": "default"}
    assert compile_ns(make_point(wall=(100, 90, 110), warmup_ns=(5100, 100), options=compiled)) == 5000
    assert compile_ns(make_point(wall=(100,), warmup_ns=(80,), options=compiled)) == 0
    assert compile_ns(make_point(wall=(100,), options=compiled)) is None
    assert compile_ns(make_point(wall=(), warmup_ns=(80,), options=compiled)) is None
    assert compile_ns(make_point(wall=(100,), warmup_ns=(5100,))) is None
