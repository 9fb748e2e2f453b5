"""From the ideal step to the measured one: the parts are the step, and each is found where it was planted."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.analysis.computing import KnownWork
from flopwise.analysis.explanation import explain_steps
from flopwise.analysis.idle import FITS, clock_fit, untraced_idle
from flopwise.analysis.reading import known_work, with_waterfall
from flopwise.analysis.traced_steps import traced_steps
from flopwise.analysis.waterfall import UNTRACED, waterfall
from flopwise.records import waterfall as w
from flopwise.records.ceilings import Matmul, Tile
from flopwise.records.run import Telemetry
from flopwise.records.untraced import UntracedStep
from flopwise.render.waterfall_view import waterfalls_table
from flopwise.spec.workload import workload
from flopwise.trace import tables
from flopwise.trace.read import read_trace
from flopwise.work.operation import OpWork

from .steps_made import ADAM, BF16, FLASH, FP32, H200, LIMITS, MUL, NCCL, Step, peak_ns
from .test_idle import frame

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
KERNELS = (BF16, FP32, FLASH, MUL, ADAM, NCCL, "softmax_warp_forward", "reduce_kernel", "unheard_of")


def clocked(ns):
    return UntracedStep(ns=ns, low_ns=ns, high_ns=ns, measured=True)


def fills(found):
    assert math.fsum(part.ns for part in found.parts) == pytest.approx(found.step_ns, rel=1e-9)
    assert math.fsum(part.share for part in found.parts) == pytest.approx(1.0)
    for part in found.parts:
        if part.by_class:
            assert math.fsum(part.by_class.values()) == pytest.approx(part.ns, rel=1e-9)
    order = [w.PARTS.index(part.name) for part in found.parts]
    assert order == sorted(set(order))
    if found.limit is not None:
        assert math.fsum(cause.ns for cause in found.limit.causes) == pytest.approx(found.step_ns, rel=1e-9)
        assert math.fsum(cause.least_ns for cause in found.limit.causes) == pytest.approx(found.limit.limit_ns)
    return found


def one(kind, **more):
    return OpWork(op="x", module="", phase="forward", kind=kind, dtype="bf16", **more)


# --- the law


@st.composite
def steps(draw):
    made = Step()
    for _ in range(draw(st.integers(1, 12))):
        sizes = draw(st.sampled_from(["", "[[64, 32], [32, 40]]", "[[1, 7], [7, 9]]", "[[3], [4]]", "nonsense"]))
        made.run(
            draw(st.sampled_from(KERNELS)),
            draw(st.integers(0, 5000)),
            op=draw(st.sampled_from(["aten::mm", "aten::mul", "aten::_flash_attention_forward"])),
            sizes=sizes,
            under=draw(st.sampled_from(["", "recompute", "optimizer step", "attention/softmax", "forward", "loss"])),
            start=draw(st.integers(0, 20_000)),
            stream=draw(st.sampled_from([7, 8])),
            launched=draw(st.integers(0, 20_000)),
        )
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, 20_000))
        made.syncs.append((begin, begin + draw(st.integers(0, 3000)), 1, 11, 0))
    if draw(st.booleans()):
        made.ranges.append((5000, 9000, 1, 11, made.name("enumerate(DataLoader)#_Iter.__next__"), "annotation"))
    return made


@settings(max_examples=60, deadline=None)
@given(made=steps(), knows=st.booleans(), slower=st.floats(0.95, 1.2))
def test_the_parts_are_the_step(made, knows, slower):
    trace = made.trace()
    if all(start == end for start, end, *_ in made.kernels):
        return
    part = traced_steps(trace)
    ops = (one("matmul", flops=2 * 64**3, shapes=((64, 64), (64, 64))), one("elementwise", read_bytes=10**6))
    known = KnownWork(ops=ops, model_flops=2.0 * 64**3) if knows else None
    fills(waterfall(part, LIMITS, H200, known=known))
    window = part.high_ns - part.low_ns
    wall = slower * window / len(part.steps)
    if clock_fit(part.idle, window, wall * len(part.steps)) == FITS:
        alone = untraced_idle(part.idle, window, wall * len(part.steps))
        found = waterfall(part, LIMITS, H200, known=known, untraced=(clocked(wall), alone))
        assert math.fsum(p.ns for p in found.parts) == pytest.approx(wall, rel=1e-6, abs=2)


# --- each part where it was planted


def test_matmul_at_its_peak_is_all_ideal():
    flops = 2 * 8192**3
    found = fills(Step().mm(8192, 8192, 8192, round(peak_ns(flops))).waterfall())
    assert found.ns(w.IDEAL) == pytest.approx(peak_ns(flops))
    assert found.ns(w.IDEAL) == pytest.approx(found.step_ns, rel=1e-4)
    assert found.mfu == pytest.approx(LIMITS.matmul["bf16"].peak_flops / H200.peaks["bf16"], rel=1e-4)


def test_a_half_empty_wave_is_shape():
    tile = Tile(m=128, n=128, start_ns=0.0, flops_per_s=1e12)
    limits = msgspec.structs.replace(
        LIMITS,
        processors=100,
        matmul=LIMITS.matmul | {"bf16": Matmul(peak_flops=1e14, tiles=(tile,), join_ns=1e9)},
        bandwidth_bytes_per_s=1e18,
    )
    wave = 2 * 128 * 128 * 4096 / 1e12 * 1e9
    found = fills(Step().mm(128 * 101, 4096, 128, round(2 * wave) + 500).waterfall(limits))
    assert found.ns(w.IDEAL) == pytest.approx(1.01 * wave)
    assert found.ns(w.MATMUL_SHAPE) == pytest.approx(0.99 * wave, rel=1e-6)
    assert found.ns(w.MATMUL_OTHER) == pytest.approx(500, abs=1)


def test_a_vocabulary_that_is_not_aligned_is_found_in_all_three_products():
    """Forward it is N, in the gradient of the input K, in that of the weight M."""
    slow = 40_000_000
    made = Step().mm(2048, 768, 50257, slow).mm(2048, 50257, 768, slow, f"{BF16}_K")
    found = fills(made.mm(50257, 2048, 768, slow, f"{BF16}_M").mm(2048, 768, 3072, 100_000, f"{BF16}_N").waterfall())
    assert found.ns(w.MATMUL_UNALIGNED) > 0.98 * 3 * slow
    assert "50257" in next(p.why for p in found.parts if p.name == w.MATMUL_UNALIGNED)
    aligned = fills(Step().mm(2048, 768, 50304, slow).waterfall())
    assert aligned.ns(w.MATMUL_UNALIGNED) == 0
    assert aligned.ns(w.MATMUL_OTHER) > 0.98 * slow


def test_fp32_between_bf16_is_low_precision_not_used():
    """Most FLOPs are in bf16: the rest could be, too; its shape is judged at fp32's own rate."""
    fp32_ns = peak_ns(2 * 4096**3, "fp32")
    made = Step().mm(8192, 8192, 8192, 2_000_000).mm(4096, 4096, 4096, round(fp32_ns) + 1000, FP32)
    found = fills(made.waterfall())
    assert found.ns(w.MATMUL_PRECISION) == pytest.approx(fp32_ns - peak_ns(2 * 4096**3))
    assert found.ns(w.IDEAL) == pytest.approx(peak_ns(2 * 8192**3 + 2 * 4096**3))


def test_a_step_all_in_fp32_has_its_ideal_there():
    found = fills(Step().mm(4096, 4096, 4096, 9_000_000, FP32).waterfall())
    assert found.ns(w.MATMUL_PRECISION) == 0
    assert found.ns(w.IDEAL) == pytest.approx(peak_ns(2 * 4096**3, "fp32"))
    assert "fp32" in found.convention


def test_fused_attention_beyond_its_flops():
    q = "[4, 512, 12, 64]"  # heads behind tokens
    made = Step().mm(8192, 8192, 8192, 2_000_000)
    made.run(FLASH, 30_000, "aten::_flash_attention_forward", f"[{q}, {q}, {q}]")
    made.run(FLASH, 70_000, "aten::_flash_attention_backward", f"[{q}, {q}, {q}, {q}, {q}]")
    found = fills(made.waterfall())
    forward = 4 * 4 * 12 * 512 * 512 * 64
    assert found.ns(w.ATTENTION_PART) == pytest.approx(100_000 - peak_ns(3 * forward))
    assert found.mfu * found.step_ns / 1e9 * H200.peaks["bf16"] == pytest.approx(2 * 8192**3 + 3 * forward)
    assert found.hfu / found.mfu == pytest.approx((2 * 8192**3 + 3.5 * forward) / (2 * 8192**3 + 3 * forward))


def test_attention_written_out_is_what_lies_between_its_matmuls():
    made = Step().mm(8192, 8192, 8192, 2_000_000).run(MUL, 7000, under="attention").run(MUL, 5000)
    made.run(MUL, 40_000, under="attention/attn_softmax").run("softmax_warp_forward", 3000)
    found = fills(made.waterfall())
    assert found.ns(w.ATTENTION_PART) == pytest.approx(43_000)
    assert found.ns(w.BELOW_BANDWIDTH) == pytest.approx(12_000)


def test_bytes_at_full_bandwidth_where_the_work_is_known():
    ops = (one("elementwise", read_bytes=4_800_000, write_bytes=4_800_000), one("reduction", read_bytes=48_000_000))
    made = Step().run(MUL, 5000).run("reduce_kernel", 4000)
    found = fills(made.waterfall(known=KnownWork(ops=ops)))
    full = next(p for p in found.parts if p.name == w.MEMORY_BOUND)
    assert full.by_class == {"elementwise": pytest.approx(2000), "reduction": pytest.approx(4000)}  # out of the cache
    assert found.ns(w.BELOW_BANDWIDTH) == pytest.approx(3000)
    assert found.roofline_share == pytest.approx(12_000 / found.step_ns)


def test_recomputation_and_the_optimizer_are_parts_of_their_own():
    made = Step().mm(64, 64, 64, 9000).mm(64, 64, 64, 4000, under="recompute").run(MUL, 300, under="recompute")
    found = fills(made.run(ADAM, 700).run(MUL, 50, under="optimizer step").waterfall())
    assert found.ns(w.RECOMPUTATION) == pytest.approx(4300)
    assert found.ns(w.OPTIMIZER_PART) == pytest.approx(750)
    assert found.hfu == pytest.approx(2 * found.mfu)


def test_communication_counts_where_nothing_else_runs():
    made = Step().mm(64, 64, 64, 9000).run(NCCL, 10_000, start=5000, stream=8)  # the matmul ends at 10,000
    made.run(MUL, 2000, start=9000, stream=9)  # 1,000 of them beside the matmul, all beside the communication
    found = fills(made.waterfall())
    assert found.ns(w.EXPOSED_COMMUNICATION) == pytest.approx(4000)
    assert found.ns(w.BELOW_BANDWIDTH) == pytest.approx(1000)
    assert found.step_ns == 14_000


def test_updates_beside_the_backward_pass_count_where_it_does_not_run():
    made = Step().mm(64, 64, 64, 9000).run(ADAM, 3000, start=2000, stream=8)  # within the matmul, until 10,000
    made.run(ADAM, 4000, start=9000, stream=8)  # 1,000 of them beside it
    made.run(MUL, 500, start=12_000)  # beside the update
    found = fills(made.waterfall())
    assert found.ns(w.OPTIMIZER_PART) == pytest.approx(2500)
    assert found.ns(w.BELOW_BANDWIDTH) == pytest.approx(500)
    assert found.step_ns == 12_000
    told = next(part.why for part in found.parts if part.name == w.OPTIMIZER_PART)
    assert told == "4.50 µs more overlapped with other work"


def test_idle_by_cause():
    made = Step().mm(64, 64, 64, 1000)  # until 2,000
    made.run(MUL, 1000, start=5000, launched=4500)
    made.run(MUL, 1000, start=9000, launched=8499)
    made.run(MUL, 1000, start=15_000, launched=14_499)
    made.syncs.append((5500, 6100, 1, 11, 0))
    made.ranges.append((10_500, 14_000, 1, 11, made.name("enumerate(DataLoader)#_Iter.__next__"), "annotation"))
    found = fills(made.waterfall())
    assert found.ns(w.IDLE_LAUNCH) == pytest.approx(2501 + 1000 + 1900)
    assert found.ns(w.IDLE_SYNCHRONISATION) == pytest.approx(600)  # as long as it waited
    assert found.ns(w.IDLE_INPUT) == pytest.approx(3500)
    assert found.ns(w.IDLE_OTHER) == pytest.approx(499 + 500 + 500)


def test_without_sizes_no_flops_are_made_up():
    found = fills(Step().run(BF16, 9000, "aten::mm").run(FLASH, 500, "flash").waterfall())
    assert (found.mfu, found.hfu, found.roofline_share, found.convention) == (None, None, None, "")
    assert found.ns(w.IDEAL) == 0
    assert found.ns(w.MATMUL_OTHER) == pytest.approx(9000)
    assert found.ns(w.ATTENTION_PART) == pytest.approx(500)
    assert any("FLOPs of the step are unknown" in note for note in found.notes)


def test_a_graph_as_one_row_has_the_known_flops_in_it():
    """A whole step of 1 ms in one row: what its matmuls must take is known by the workload, the rest is not."""
    made = Step().run(MUL, 10).trace()
    made = replace(made, graph_runs=frame(tables.GRAPH_RUNS, (1010, 1_001_010, 1, 0, 7, 99)))
    ops = (one("matmul", flops=2 * 2048**3, shapes=((2048, 2048), (2048, 2048))),)
    known = KnownWork(ops=ops, model_flops=2.0 * 2048**3)
    found = fills(waterfall(traced_steps(made), LIMITS, H200, known=known))
    assert found.ns(w.IDEAL) == pytest.approx(peak_ns(2 * 2048**3))
    assert found.ns(w.MATMUL_OTHER) > 0.9e6
    assert any("one row each" in note for note in found.notes)


def test_matmuls_by_kernels_of_an_unknown_name_take_no_time_below_zero():
    """Their FLOPs are known by the workload, their time is with the other work."""
    ops = (one("matmul", flops=2 * 8192**3, shapes=((8192, 8192), (8192, 8192))),)
    known = KnownWork(ops=ops, model_flops=2.0 * 8192**3)
    found = fills(Step().run("unheard_of", 2_000_000).run(BF16, 9000, "aten::mm").waterfall(known=known))
    assert min(part.ns for part in found.parts) >= 0
    assert found.mfu == pytest.approx(2 * 8192**3 / (found.step_ns / 1e9) / H200.peaks["bf16"])
    assert any("not recognised" in note for note in found.notes)


# --- real steps


@pytest.fixture(scope="module")
def naive():
    names = ("kineto.json.gz", "nsys.sqlite.gz")
    return [traced_steps(read_trace(FIXTURES / f"h200-small-fp32-naive-2steps.{name}")) for name in names]


@pytest.fixture(scope="module")
def compiled():
    return traced_steps(read_trace(FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"))


def test_two_profilers_tell_the_same_parts(naive):
    """With the same workload and the same untraced clock: the host's part of the trace is the profiler's own."""
    options = {"precision": "fp32", "attention": "naive", "norm": "eager", "activation": "eager"}
    known = known_work(workload("small", batch=4, context=512, **options), H200)
    parts = []
    for part in naive:
        alone = untraced_idle(part.idle, part.high_ns - part.low_ns, 65e6 * 2)
        parts.append(fills(waterfall(part, LIMITS, H200, known=known, untraced=(clocked(65e6), alone))))
    kineto, nsys = parts
    assert kineto.measured_by == UNTRACED
    for name in w.PARTS:
        assert kineto.ns(name) / 65e6 == pytest.approx(nsys.ns(name) / 65e6, abs=0.02)
    assert kineto.mfu == pytest.approx(nsys.mfu)
    assert 0.6 < kineto.roofline_share < 0.7


def test_the_naive_step_by_its_sizes(naive):
    found = fills(waterfall(naive[0], LIMITS, H200))
    flops = found.ns(w.IDEAL) * LIMITS.matmul["fp32"].peak_flops / 1e9
    model = known_work(workload("small", batch=4, context=512), H200).model_flops
    assert flops == pytest.approx(model, rel=1e-9)  # the sizes in the trace are the model's
    assert found.mfu == found.hfu
    assert found.ns(w.ATTENTION_PART) == pytest.approx(7.4e6, rel=0.01)
    assert found.ns(w.IDLE_LAUNCH) / found.step_ns > 0.4


def test_without_sizes_nsys_tells_no_ideal(naive):
    found = fills(waterfall(naive[1], LIMITS, H200))
    assert found.mfu is None
    assert found.ns(w.MATMUL_OTHER) == pytest.approx(39.1e6, rel=0.01)


def test_the_compiled_step_is_mostly_waiting(compiled):
    found = fills(waterfall(compiled, LIMITS, H200))
    assert found.ns(w.IDLE_LAUNCH) / found.step_ns > 0.6
    assert found.ns(w.MATMUL_PRECISION) == found.ns(w.MATMUL_UNALIGNED) == 0
    assert 0 < found.ns(w.ATTENTION_PART) < 0.6e6
    assert found.mfu == pytest.approx(0.0677, abs=0.001)
    assert found.hfu > found.mfu  # scores of the backward pass, computed again


def test_a_gpu_that_is_not_known_has_no_waterfall(compiled):
    part = replace(compiled, whole=replace(compiled.whole, gpu="Voodoo 2", gpus={}))
    found = with_waterfall(explain_steps(part), part)
    assert found.waterfall is None
    assert "no waterfall: the limits of 'Voodoo 2' are not known; --gpu names one" in found.notes
    assert with_waterfall(explain_steps(part), part, gpu="h200").waterfall is not None


def test_a_clock_that_the_power_cap_held_down_is_told(compiled):
    cold = Telemetry(sm_mhz=(1980, 1600), power_mw=(100, 700), throttle=("software power cap",))
    told = with_waterfall(explain_steps(compiled), compiled, telemetry=cold).waterfall
    assert any("1600 of 1980 MHz" in note for note in told.notes)
    assert any("1600 of 1980 MHz" in note for note in waterfalls_table({"before": told}).notes)
    quiet = with_waterfall(explain_steps(compiled), compiled).waterfall
    assert not any("MHz" in note for note in quiet.notes)
