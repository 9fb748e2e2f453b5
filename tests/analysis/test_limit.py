"""A step against the power-capped roofline: each cause has its own limit, and all of them are the step."""

import msgspec
import pytest

from flopwise.analysis.computing import KnownWork
from flopwise.predict.op_time import matmul_limits, matmul_ns
from flopwise.records import limit as causes
from flopwise.records import waterfall as w
from flopwise.work.operation import OpWork

from .steps_made import ADAM, BF16, H200, LIMITS, MUL, Step

FP8 = "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT"
SIDE = 8192
FLOPS = 2 * SIDE**3
PEAK_NS = 1e9 * FLOPS / H200.peaks["bf16"]


def beyond(found):
    return {cause.key: cause.beyond_ns for cause in found.limit.causes if cause.key not in (causes.LAUNCH, causes.IDLE)}


def test_a_clock_held_down_raises_the_limit_and_not_the_step():
    step = Step().mm(SIDE, SIDE, SIDE, round(2 * PEAK_NS))
    free, held = (step.waterfall(held=clock).limit for clock in (None, (915.0, 1980)))
    assert free.limit_ns == free.peak_ns == pytest.approx(PEAK_NS)
    assert free.clock_mhz is None
    # Half of the 1,830 MHz that the datasheet's peak is at: the same FLOPs take twice as long, which is what they took.
    assert held.limit_ns == pytest.approx(2 * PEAK_NS)
    assert held.capped_ns == pytest.approx(PEAK_NS)
    assert held.remaining_ns == pytest.approx(0, abs=1)
    faster = step.waterfall(held=(1900.0, 1980)).limit
    assert faster.limit_ns == pytest.approx(PEAK_NS)  # a clock above the peak's raises no limit


def test_each_cause_is_beyond_its_own_limit():
    moved, updated = 48_000_000, 96_000_000  # bytes: 10 and 20 µs at 4.8 TB/s
    step = Step().mm(SIDE, SIDE, SIDE, round(PEAK_NS) + 7000)
    step.run(MUL, 15_000).run(ADAM, 30_000, under="optimizer step")
    blank = {"op": "x", "module": "", "dtype": "bf16"}
    shapes = ((SIDE, SIDE), (SIDE, SIDE))
    ops = (
        OpWork(**blank, phase="forward", kind="matmul", flops=FLOPS, shapes=shapes, kernels=1),
        OpWork(**blank, phase="forward", kind="elementwise", read_bytes=moved, kernels=1),
        OpWork(**blank, phase="optimizer", kind="optimizer", read_bytes=updated, kernels=1),
    )
    found = step.waterfall(known=KnownWork(ops=ops, model_flops=float(FLOPS)))
    assert beyond(found) == pytest.approx(
        {causes.MATMUL: 7000, causes.MEMORY: 5000, causes.OPTIMIZER: 10_000}, rel=1e-3
    )
    assert found.limit.bytes_ns == pytest.approx(30_000)
    assert [cause.key for cause in found.limit.ranked()[:3]] == [causes.OPTIMIZER, causes.MATMUL, causes.MEMORY]


def test_bytes_that_lie_in_the_cache_are_no_gain_beyond_the_limit():
    ops = (OpWork(op="x", module="", dtype="bf16", phase="forward", kind="elementwise", read_bytes=10**9, kernels=1),)
    step = Step().mm(SIDE, SIDE, SIDE, round(2 * PEAK_NS)).run(MUL, 1000)
    found = step.waterfall(known=KnownWork(ops=ops, model_flops=float(FLOPS)))
    assert beyond(found)[causes.MEMORY] == 0


def test_products_in_fp8_have_fp8s_peak_and_casts_are_their_own_cause():
    step = Step().run(FP8, round(PEAK_NS), "aten::_scaled_mm", f"[[{SIDE}, {SIDE}], [{SIDE}, {SIDE}]]")
    step.run("_fp8_cast_kernel", 3000, "flopwise::fp8_cast").run("_fp8_tensor_amax_kernel", 2000, "flopwise::fp8_cast")
    found = step.waterfall()
    assert found.precision == "fp8"
    assert found.ns(w.FP8_CASTS) == 5000
    assert found.ns(w.BELOW_BANDWIDTH) == 0
    assert beyond(found) == pytest.approx({causes.MATMUL: PEAK_NS / 2, causes.CASTS: 5000}, rel=1e-3)


def test_a_machine_whose_fp8_was_not_measured_has_twice_the_rate_of_bf16():
    measured = msgspec.structs.replace(LIMITS, matmul={k: v for k, v in LIMITS.matmul.items() if k != "fp8"})
    shape = (1, 4096, 2048, 8192)
    half = matmul_ns(*shape, measured.matmul["bf16"], measured.processors)
    assert matmul_ns(*shape, matmul_limits("fp8", measured), measured.processors) == pytest.approx(half / 2)
    assert matmul_limits("int8", measured) is measured.matmul["fp32"]


def test_a_step_of_unknown_size_has_no_limit():
    assert Step().run(BF16, 1000, "aten::mm").waterfall().limit is None
