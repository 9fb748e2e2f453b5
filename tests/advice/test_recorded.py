"""Levers of a user's step: predicted over what was recorded of it, corrected by what was measured."""

import msgspec
import pytest

from flopwise.advice.constants import WORTH_TRYING
from flopwise.advice.facts import Facts
from flopwise.advice.moves import moves
from flopwise.advice.predicted import baseline, predicted_change
from flopwise.advice.ranking import MoveRanking
from flopwise.analysis.details import Details
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.predict.recorded.step import RecordedStep
from flopwise.records.prediction import PredictedStep, Weight
from flopwise.spec.workload import workload
from flopwise.work.operation import ELEMENTWISE, MATMUL, OPTIMIZER, Footprint, OpWork

from .made import H200, MS, ceilings, point

TARGET, LAYERS = "py:my.steps:make", 12
ROWS, WIDTH = 8192, 2048


def recorded(rows=ROWS, width=WIDTH):
    """A model of like blocks, each a matmul and a chain of two operations, trained with AdamW."""
    weights = tuple(
        Weight(tensor=n, shape=(width, width), dtype="fp32", module=f"layers.{n}.up") for n in range(LAYERS)
    )
    return RecordedStep(
        as_written=_step("fp32", rows, width, weights), cast={"bf16": _step("bf16", rows, width, weights)}
    )


def _step(dtype, rows, width, weights):
    item, ops, tensor = 4 if dtype == "fp32" else 2, [], 1000
    row, square = rows * width * item, width * width * item
    for phase, times in (("forward", 1), ("backward", 2)):
        for n in range(LAYERS):
            for _ in range(times):
                ops.append(
                    OpWork(
                        op="mm", module=f"layers.{n}.up", phase=phase, kind=MATMUL, dtype=dtype, flops=2 * rows * width**2,
                        read_bytes=row + square, write_bytes=row, shapes=((rows, width), (width, width)),
                        reads=((tensor, row), (n, square)), writes=((tensor + 1, row),),
                    )
                )  # fmt: skip
                for place in (1, 2):
                    reads, writes = ((tensor + place, row),), ((tensor + place + 1, row),)
                    moved = {"reads": reads, "writes": writes, "read_bytes": row, "write_bytes": row}
                    ops.append(
                        OpWork(op="mul", module=f"layers.{n}", phase=phase, kind=ELEMENTWISE, dtype=dtype,
                               shapes=((rows, width),), **moved)
                    )  # fmt: skip
                tensor += 3
    every = 4 * LAYERS * width * width
    for name in ("_foreach_mul_", "_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_"):
        reads = tuple((n + 100 * k, 4 * width * width) for k in range(4) for n in range(LAYERS))
        ops.append(
            OpWork(op=name, module="", phase=OPTIMIZER, kind=OPTIMIZER, dtype="fp32", read_bytes=2 * every,
                   write_bytes=every, reads=reads, kernels=4)
        )  # fmt: skip
    return PredictedStep(
        source="dry run", peak=Footprint(moment="peak"), ops=tuple(ops), moments=(), parameters=1, weights=weights
    )


def time_of(step, **options):
    return predict(workload(TARGET, **options), Machine(gpu=H200), recorded=step).time_with(ceilings())


def facts(step=None, *, wall=None, launch=None, busy=None, details=None, **options):
    """Measured as predicted, but for the clocks that are given."""
    step = step or recorded()
    time = time_of(step, **options)
    clocks = {"wall": wall or time.wall_ns, "launch": launch or time.host_ns, "busy": busy or time.gpu_ns}
    return Facts(
        point=point(TARGET, **clocks, **options),
        ceilings=ceilings(),
        gpu=H200,
        recorded=step,
        details=details or Details(steps=1),
    )


def test_without_what_was_recorded_a_users_step_has_no_predictions():
    known = facts()
    assert baseline(known) is not None
    assert baseline(msgspec.structs.replace(known, recorded=None)) is None


def test_a_lever_saves_the_difference_of_the_two_steps():
    step = recorded()
    saving = predicted_change(facts(step), {"precision": "bf16"}).saving_ns
    assert saving == pytest.approx(time_of(step).wall_ns - time_of(step, precision="bf16").wall_ns, rel=0.01)
    assert saving > 0.7 * time_of(step).wall_ns


def test_a_step_twice_as_slow_as_predicted_has_matmuls_of_its_own_precision_corrected():
    step = recorded()
    time = time_of(step)
    slow = facts(step, wall=2 * time.wall_ns, busy=2 * time.gpu_ns)
    assert baseline(slow).corrections.matmul == pytest.approx(2.0, rel=0.05)
    fused = [predicted_change(known, {"optimizer": "fused"}).saving_ns for known in (facts(step), slow)]
    assert fused[1] == pytest.approx(2 * fused[0], rel=0.1)


def test_what_finds_nothing_to_change_is_not_known_and_not_nothing():
    for levers in ({"norm": "triton"}, {"loss": "fused"}, {"rope": "triton"}, {"precision": "fp16"}):
        assert predicted_change(facts(), levers) is None
    assert predicted_change(facts(), {}, batch=8) is None


def test_a_launch_that_waits_for_a_full_queue_is_not_the_hosts_work():
    """A past bug: of a step of 745 ms whose launches blocked, bf16 was promised 128 ms, because 'the host is busy for 617 ms'."""
    step = recorded()
    wall = 1.1 * time_of(step).wall_ns
    blocked = facts(step, wall=wall, launch=617 / 745 * wall, busy=0.995 * wall)
    assert blocked.host_ns is None
    start, change = baseline(blocked), predicted_change(blocked, {"precision": "bf16"})
    assert start.now.host_ns == pytest.approx(time_of(step).host_ns, rel=0.01)
    assert change.saving_ns > 0.7 * wall


def test_a_trace_bounds_the_hosts_work():
    step = recorded()
    time = time_of(step)
    traced = Details(steps=1, host_ns=0.5 * time.host_ns)
    bound = facts(step, wall=745 * MS, launch=617 * MS, busy=740 * MS, details=traced)
    assert bound.host_ns == 0.5 * time.host_ns
    assert baseline(bound).now.host_ns == pytest.approx(0.5 * time.host_ns, rel=0.05)


def test_moves_are_ranked_by_the_model_and_after_a_step_from_there():
    known = facts()
    ranking, open_moves = MoveRanking(known), moves(known.workload)
    least = WORTH_TRYING * ranking.start.now.wall_ns
    best = ranking.choose(open_moves, least)
    assert best.lever == "precision"
    assert [move.name for move in open_moves if move.lever == "norm" and ranking.saving_ns(move) is not None] == []
    later = ranking.after(point(TARGET, wall=30 * MS, launch=5 * MS, busy=30 * MS, precision="bf16"))
    fused = next(move for move in open_moves if move.name == "optimizer = fused")
    assert later.saving_ns(fused) > 0


def test_savings_of_a_deep_model_follow_from_shallow_ones():
    ranking = MoveRanking(facts(recorded()))
    assert len(ranking.shallow) == 2
    for move in moves(ranking.facts.workload):
        exact = ranking.saving_ns(move)
        if exact is not None and move.lever != "graph":
            assert ranking.rough_ns(move) == pytest.approx(exact, rel=0.25, abs=0.1 * MS)
