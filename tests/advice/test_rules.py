"""Every rule on a step where it must speak, with the right number, and on one where it must not."""

import msgspec
import pytest

from flopwise.advice.constants import OVERLAP_SHARE
from flopwise.advice.facts import Facts
from flopwise.advice.rules import (
    ALL_RULES,
    allocator_calls,
    checkpointing,
    cold_kernels,
    eager_pieces,
    exposed_communication,
    exposed_optimizer,
    exposed_transfers,
    fp32_logits,
    fp32_matmul,
    fragmentation,
    graph_breaks,
    host_code,
    host_syncs,
    input_stalls,
    launch_bound,
    naive_attention,
    repeated_casts,
    slow_optimizer,
    slow_sdpa,
    small_batch,
    tf32_off,
    throttled,
    unaligned,
    unfused_chains,
    zeroed_gradients,
)
from flopwise.analysis.attention import AttentionParts
from flopwise.analysis.blame import OUTSIDE, HostBlame
from flopwise.analysis.details import Chain, CompiledRegions, Details
from flopwise.analysis.host_waits import HostWait
from flopwise.analysis.idle import ALLOCATOR, COMPILATION, HOST, INPUT, TRANSFER
from flopwise.analysis.product_sizes import Product
from flopwise.analysis.steps import ITERATIONS
from flopwise.analysis.transfers import Transfer
from flopwise.records.run import Environment, Gpu, PhaseMemory, Ran, Telemetry
from flopwise.records.waterfall import (
    IDLE_HOST,
    IDLE_INPUT,
    IDLE_LAUNCH,
    IDLE_SYNCHRONISATION,
    MATMUL_PRECISION,
    MATMUL_UNALIGNED,
    OPTIMIZER_PART,
)

from .made import BF16, MS, SGEMM, ceilings, explained, known, point, seen, waterfall

GIB = 2**30
GOOD = ("forward", "matmul", "mlp", BF16, 80 * MS, 100.0)


def drawn(found):
    return sum(found.draws_on.values())


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.__name__.rpartition(".")[2])
def test_a_rule_that_knows_nothing_says_nothing(rule):
    assert not rule.check(Facts())
    assert not rule.check(seen(GOOD))


def test_launch_bound():
    found = launch_bound.check(seen(("forward", "matmul", "", BF16, 30 * MS, 300.0), late=60 * MS))
    assert found.saving_ns == pytest.approx(60 * MS)
    assert found.draws_on == {IDLE_LAUNCH: 60 * MS}
    assert launch_bound.check(seen(GOOD, late=4 * MS)) is None


def test_launch_bound_by_the_clocks_alone():
    facts = Facts(point=point(wall=60 * MS, launch=58 * MS, busy=20 * MS))
    assert launch_bound.check(facts).saving_ns == pytest.approx(40 * MS)
    assert launch_bound.check(Facts(point=point(wall=60 * MS, launch=20 * MS, busy=59 * MS))) is None
    assert launch_bound.check(Facts(point=point(wall=60 * MS, launch=58 * MS, busy=20 * MS, graph="on"))) is None


def test_a_launch_bound_step_is_told_what_helps_without_a_graph():
    slow = known(precision="bf16", batch=1, context=128)
    lines = [line for line in launch_bound.check(slow).evidence if line.startswith("without a graph")]
    assert [line.rpartition(": ")[2] for line in lines] == [
        "--compile reduce-overhead",
        "--optimizer fused --projections fused --norm triton --activation triton --rope triton",
    ]


def test_fp32_matmul():
    found = fp32_matmul.check(seen(("forward", "matmul", "", SGEMM, 90 * MS, 10.0)))
    assert found.saving_ns == pytest.approx(90 * MS * (1 - 66.9 / 989.4))
    assert found.levers == {"precision": "bf16"}
    assert SGEMM in found.evidence[0]
    assert set(found.draws_on) == {MATMUL_PRECISION}
    assert fp32_matmul.check(seen(GOOD)) is None


def test_tf32_off():
    found = tf32_off.check(seen(("forward", "matmul", "", SGEMM, 90 * MS, 10.0)))
    assert found.saving_ns == pytest.approx(90 * MS * (1 - 66.9 / 494.7))
    tf32 = "cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4"
    assert tf32_off.check(seen(("forward", "matmul", "", tf32, 90 * MS, 10.0))) is None
    assert fp32_matmul.check(seen(("forward", "matmul", "", tf32, 90 * MS, 10.0))).saving_ns == pytest.approx(
        45 * MS, rel=1e-3
    )


def test_naive_attention():
    forward = AttentionParts(softmax_ns=10 * MS, matmul_ns=5 * MS, fused_ns=0.0)
    backward = AttentionParts(softmax_ns=20 * MS, matmul_ns=9 * MS, fused_ns=0.0)
    found = naive_attention.check(seen(GOOD, attention=forward, attention_backward=backward))
    assert found.saving_ns == pytest.approx(30 * MS)
    fused = ("forward", "attention", "", "cudnn_generated_sdpa_flash_fprop", 2 * MS, 12.0)
    assert naive_attention.check(seen(GOOD, fused, attention=forward)) is None


def test_naive_attention_of_a_known_model_saves_memory_too():
    found = naive_attention.check(known(attention="naive", precision="bf16", batch=16))
    assert found.saving_bytes > GIB
    assert found.saving_ns > 0
    assert "model of the step" in found.arithmetic
    assert naive_attention.check(known(attention="sdpa")) is None


def test_softmax_of_the_loss_is_not_attention():
    assert naive_attention.check(seen(GOOD, ("loss", "softmax", "", "softmax_kernel", 9 * MS, 1.0))) is None
    assert naive_attention.check(seen(GOOD, ("forward", "softmax", "", "softmax_kernel", 9 * MS, 1.0))) is not None


def test_slow_sdpa():
    flash = ("forward", "attention", "", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", 50 * MS, 12.0)
    found = slow_sdpa.check(seen(GOOD, flash, step=140 * MS))
    assert found.saving_ns == pytest.approx(50 * MS * 0.38)
    assert found.levers == {"attention": "sdpa-cudnn"}
    from flopwise.spec.gpu import gpu

    assert slow_sdpa.check(seen(GOOD, flash, facts={"gpu": gpu("a100")})) is None
    cudnn = ("forward", "attention", "", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 5 * MS, 12.0)
    assert slow_sdpa.check(seen(GOOD, cudnn)) is None


def test_unfused_chains():
    chain = Chain(
        module="blocks.*.norm", phase="forward", length=5, count=24.0, gpu_ns=20 * MS, kernels=("pow", "mean")
    )
    found = unfused_chains.check(seen(GOOD, facts={"details": Details(steps=1, chains=(chain,))}))
    assert found.saving_ns == pytest.approx(20 * MS * 4 / 5 / 2)
    assert "24 × 5 kernels" in found.evidence[0]
    inside = msgspec.structs.replace(chain, module="attn_softmax")
    assert unfused_chains.check(seen(GOOD, facts={"details": Details(steps=1, chains=(inside,))})) is None
    compiled = point(wall=9 * MS, launch=2 * MS, busy=9 * MS, compile="default")
    assert (
        unfused_chains.check(seen(GOOD, facts={"details": Details(steps=1, chains=(chain,)), "point": compiled}))
        is None
    )


def test_eager_pieces_by_the_recipe():
    found = eager_pieces.check(known(norm="eager", precision="bf16", batch=16))
    assert [one.levers for one in found] == [{"norm": "triton"}, {"rope": "triton"}]
    assert all(drawn(one) > 0 for one in found)
    assert eager_pieces.check(known(norm="eager", compile="default")) == ()


def test_eager_pieces_of_a_trace():
    """Four kernels a call; two are what a residual and a fused norm take, however many layers there are."""
    norm = Chain(module="blocks.0.norm", phase="forward", length=4, count=12.0, gpu_ns=10 * MS)
    (found,) = eager_pieces.check(seen(GOOD, facts={"details": Details(steps=1, chains=(norm,))}))
    assert (found.saving_ns, found.evidence_ns) == (pytest.approx(6 * MS), 10 * MS)
    fused = msgspec.structs.replace(norm, length=2, count=24.0)
    assert eager_pieces.check(seen(GOOD, facts={"details": Details(steps=1, chains=(fused,))})) == ()
    served = seen(GOOD, steps_found_by=ITERATIONS, facts={"details": Details(steps=1, chains=(norm,))})
    assert eager_pieces.check(served) == ()


FOREACH = ("optimizer", "optimizer", "AdamW.step", "multi_tensor_apply_kernel<TensorListMetadata<3>>", 20 * MS, 56.0)


def test_slow_optimizer():
    found = slow_optimizer.check(seen(GOOD, FOREACH))
    assert found.saving_ns == pytest.approx(20 * MS * 0.63)
    assert "foreach" in found.title
    assert set(found.draws_on) == {OPTIMIZER_PART}
    loop = ("optimizer", "elementwise", "AdamW.step", "vectorized_elementwise_kernel", 20 * MS, 1400.0)
    assert "loops" in slow_optimizer.check(seen(GOOD, loop)).title
    fused = (
        "optimizer",
        "optimizer",
        "",
        "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>",
        9 * MS,
        7.0,
    )
    assert slow_optimizer.check(seen(GOOD, fused)) is None


def test_slow_optimizer_by_its_bytes():
    ran = Ran(device="cuda", parameters=1_000_000_000)
    timed = point("op:adamw", wall=110 * MS, launch=5 * MS, busy=100 * MS, fields={"ran": ran})
    found = slow_optimizer.check(seen(GOOD, FOREACH, facts={"point": timed}))
    assert found.saving_ns == pytest.approx(20 * MS - 28e9 / (0.8 * 4.8e12) * 1e9)


UPDATE = ("optimizer", "optimizer", "", "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", 9 * MS, 7.0)
BACKWARD = ("backward", "matmul", "", BF16, 30 * MS, 100.0)


def test_exposed_optimizer():
    found = exposed_optimizer.check(seen(GOOD, BACKWARD, UPDATE))
    assert found.saving_ns == pytest.approx(OVERLAP_SHARE * 9 * MS)  # the optimizer's, which is the smaller
    assert (found.levers, set(found.draws_on), found.confidence) == ({"overlap": "on"}, {OPTIMIZER_PART}, "low")
    short = exposed_optimizer.check(seen(GOOD, (*BACKWARD[:4], 2 * MS, 100.0), UPDATE))
    assert short.saving_ns == pytest.approx(OVERLAP_SHARE * 2 * MS)  # backward's matmuls
    split = msgspec.structs.replace(seen(GOOD, BACKWARD, UPDATE), waterfall=waterfall(100 * MS, OPTIMIZER_PART=6 * MS))
    assert exposed_optimizer.check(split).saving_ns == pytest.approx(
        OVERLAP_SHARE * 6 * MS
    )  # the rest ran beside other work


@pytest.mark.parametrize("levers", [{"overlap": "on"}, {"precision": "fp16"}, {"compile": "default"}], ids=str)
def test_an_optimizer_that_cannot_be_hidden_or_is_already(levers):
    timed = point(wall=100 * MS, launch=5 * MS, busy=99 * MS, optimizer="fused", **levers)
    assert exposed_optimizer.check(seen(GOOD, BACKWARD, UPDATE, facts={"point": timed})) is None


def test_a_short_optimizer_is_not_worth_hiding():
    assert exposed_optimizer.check(seen(GOOD, BACKWARD, (*UPDATE[:4], 4 * MS, 7.0))) is None


def test_exposed_optimizer_by_the_model():
    facts = known("xl", precision="bf16", optimizer="fused", batch=1, context=128, set={"n_layers": 4})
    facts = msgspec.structs.replace(facts, explanation=explained(GOOD, BACKWARD, UPDATE))
    found = exposed_optimizer.check(facts)
    assert found.saving_ns > 0
    assert "with overlap = on" in found.arithmetic
    assert found.saving_bytes > 0


LOGITS = "cunn_SoftMaxForwardSmem<4, float, float, float, LogSoftMaxForwardEpilogue>"


def test_fp32_logits():
    head = Product(op="aten::mm", batch=1, m=16384, n=50304, k=768, count=1.0, gpu_ns=MS, kernel=BF16)
    details = Details(steps=1, products=(head,))
    found = fp32_logits.check(seen(GOOD, ("loss", "loss", "", LOGITS, 8 * MS, 1.0), facts={"details": details}))
    assert found.saving_ns == pytest.approx(4 * MS)
    assert found.saving_bytes == 2 * 4 * 16384 * 50304
    assert fp32_logits.check(seen(GOOD, ("loss", "loss", "", LOGITS, 1 * MS, 1.0))) is None
    assert fp32_logits.check(known(loss="fused")) is None


def test_unaligned():
    head = Product(
        op="aten::mm", batch=1, m=2048, n=50257, k=768, count=1.0, gpu_ns=12 * MS, kernel="x_s16816gemm_bf16_align1"
    )
    facts = seen(GOOD, facts={"details": Details(steps=1, products=(head,))})
    found = unaligned.check(facts)
    assert found.saving_ns == pytest.approx(12 * MS * (1 - 0.171))  # what the lab measured of odd sides
    aligned = msgspec.structs.replace(head, kernel="nvjet_sm90_tst_128x160_64x5_1x2_h_bz_NNT", m=2047, n=50304)
    assert unaligned.check(seen(GOOD, facts={"details": Details(steps=1, products=(aligned,))})) is None
    assert "50,257 → 50,304" in found.title
    split = msgspec.structs.replace(facts, waterfall=waterfall(100 * MS, MATMUL_UNALIGNED=9 * MS))
    assert unaligned.check(split).draws_on == {MATMUL_UNALIGNED: 9 * MS}
    even = msgspec.structs.replace(head, n=50304)
    assert unaligned.check(seen(GOOD, facts={"details": Details(steps=1, products=(even,))})) is None
    on_cuda_cores = msgspec.structs.replace(head, kernel=SGEMM)
    assert unaligned.check(seen(GOOD, facts={"details": Details(steps=1, products=(on_cuda_cores,))})) is None


def test_unaligned_vocabulary_of_a_known_model():
    odd = known("gpt2", precision="bf16")
    assert "50,257" in unaligned.check(odd).title
    assert unaligned.check(known("small", precision="bf16")) is None


def test_small_batch():
    small = {"context": 128, "precision": "bf16", "set": {"n_layers": 2}}
    found = small_batch.check(known(batch=1, **small))
    assert found.saving_ns > 0
    assert "batch = " in found.code
    assert found.levers == {}
    assert found.values["largest_batch"] > 200
    assert small_batch.check(known(batch=1, memory_bytes=GIB // 4, **small)) is None  # no larger one fits
    assert small_batch.check(known(batch=64, context=1024, set={"n_layers": 2})) is None  # the chip is full


def test_host_syncs():
    wait = HostWait(call="cudaStreamSynchronize", op="aten::item", where="train/loss", count=3.0, waited_ns=8 * MS)
    found = host_syncs.check(seen(GOOD, sync=7 * MS, facts={"details": Details(steps=1, waits=(wait,))}))
    assert found.saving_ns == pytest.approx(7 * MS)
    assert found.draws_on == {IDLE_SYNCHRONISATION: 7 * MS}
    said = "3 × aten::item → cudaStreamSynchronize in {}: the host waits 8.00 ms"
    assert found.evidence == (said.format("train/loss"), "the functions that wait: profile with --stacks")
    named = msgspec.structs.replace(wait, line="train.py(9): step")
    known = host_syncs.check(seen(GOOD, sync=7 * MS, facts={"details": Details(steps=1, waits=(named,))}))
    assert known.evidence == (said.format("train.py(9): step"),)
    assert host_syncs.check(seen(GOOD, facts={"details": Details(steps=1, waits=(wait,))})) is None
    served = seen(GOOD, sync=7 * MS, steps_found_by=ITERATIONS, facts={"details": Details(steps=1, waits=(wait,))})
    assert ("next batch" in host_syncs.check(served).code, "loss" in host_syncs.check(served).code) == (True, False)


def test_a_wait_in_a_step_of_which_nothing_is_known_gets_no_advice_on_tokens():
    """A past bug: of rocprofv3's file without phases, 'done = logits.argmax(-1).eq(end)'."""
    wait = HostWait(call="hipDeviceSynchronize", op="", where="", count=1.0, waited_ns=8 * MS)
    details = {"details": Details(steps=1, waits=(wait,))}
    unknown = host_syncs.check(seen(("other", "other", "", "k", 10 * MS, 1.0), sync=7 * MS, facts=details))
    assert "logits" not in unknown.code
    assert "loss" not in unknown.code
    assert "(1 wait a step, most in hipDeviceSynchronize)" in unknown.title
    generates = host_syncs.check(seen(("forward", "matmul", "", "k", 10 * MS, 1.0), sync=7 * MS, facts=details))
    assert "logits" in generates.code


def test_repeated_casts():
    cast = ("backward", "copy/cast", "", "triton_poi_fused__to_copy_t_5", 10 * MS, 48.0)
    found = repeated_casts.check(seen(GOOD, cast))
    assert found.saving_ns == pytest.approx(7 * MS)
    transposes = ("forward", "copy/cast", "", "triton_poi_fused__unsafe_view_clone_transpose_view_8", 10 * MS, 48.0)
    assert repeated_casts.check(seen(GOOD, transposes)) is None
    assert (
        repeated_casts.check(seen(GOOD, ("forward", *cast[1:]))) is None
    )  # inference has no optimizer to write the copy
    assert repeated_casts.check(seen(("forward", "matmul", "", SGEMM, 80 * MS, 1.0), cast)) is None


def test_zeroed_gradients():
    fill = (
        "optimizer",
        "memory",
        "AdamW.zero_grad",
        "vectorized_elementwise_kernel<4, FillFunctor<float>>",
        2 * MS,
        100.0,
    )
    found = zeroed_gradients.check(seen(GOOD, fill))
    assert found.saving_ns == found.evidence_ns == pytest.approx(2 * MS)
    assert "100 fills" in found.title
    elsewhere = ("backward", "memory", "embedding", "vectorized_elementwise_kernel<4, FillFunctor<float>>", 2 * MS, 1.0)
    assert zeroed_gradients.check(seen(GOOD, elsewhere)) is None


def test_input_stalls():
    stalled = Details(steps=1, loading_ns=15 * MS)
    found = input_stalls.check(seen(GOOD, waits={INPUT: 12 * MS}, facts={"details": stalled}))
    assert (found.saving_ns, found.draws_on) == (12 * MS, {IDLE_INPUT: 12 * MS})
    assert input_stalls.check(seen(GOOD, facts={"details": Details(steps=1, loading_ns=15 * MS)})) is None


def memory(peak, reserved):
    return (PhaseMemory(phase="backward", start_bytes=0, peak_bytes=peak, end_bytes=0, reserved_bytes=reserved),)


def clocked(**fields):
    return point("small", wall=60 * MS, launch=20 * MS, busy=50 * MS, fields=fields)


def test_fragmentation():
    found = fragmentation.check(Facts(point=clocked(memory=memory(20 * GIB, 30 * GIB))))
    assert (found.saving_bytes, found.saving_ns) == (10 * GIB, 0.0)
    assert fragmentation.check(Facts(point=clocked(memory=memory(29 * GIB, 30 * GIB)))) is None


def test_checkpointing_that_is_not_needed():
    found = checkpointing.check(known("small", checkpoint=1))
    assert found.levers == {"checkpoint": "off"}
    assert found.saving_ns > 0
    large = known("large", checkpoint=1, batch=1024, context=1024, set={"n_layers": 4})
    assert checkpointing.check(large) is None  # it would not fit
    assert checkpointing.check(known("small")) is None


def test_checkpointing_that_is_missing():
    chip = Gpu(name="NVIDIA H200", memory_bytes=140 * GIB, sm_count=132, l2_bytes=0, capability="9.0")
    there = Environment(flopwise="", python="", torch="", gpu=chip)
    found = checkpointing.check(Facts(point=clocked(memory=memory(135 * GIB, 138 * GIB), environment=there)))
    assert found.saving_bytes > 0
    assert found.levers == {"checkpoint": "3"}
    assert checkpointing.check(Facts(point=clocked(memory=memory(90 * GIB, 99 * GIB), environment=there))) is None


def test_throttled():
    slow = Telemetry(sm_mhz=(1464,) * 9, utilisation=(99,) * 9, throttle=("hardware thermal slowdown",))
    found = throttled.check(Facts(point=clocked(telemetry=slow), gpu=seen(GOOD).gpu))
    assert drawn(found) == pytest.approx(50 * MS * (1 - 1464 / 1830))
    cool = msgspec.structs.replace(slow, throttle=())
    assert throttled.check(Facts(point=clocked(telemetry=cool), gpu=seen(GOOD).gpu)) is None
    fast = msgspec.structs.replace(slow, sm_mhz=(1830,) * 9)
    assert throttled.check(Facts(point=clocked(telemetry=fast), gpu=seen(GOOD).gpu)) is None


def test_graph_breaks():
    broken = Details(steps=1, compiled=CompiledRegions(frames=("0/0", "1/0", "2/0"), calls=3.0))
    found = graph_breaks.check(seen(GOOD, late=10 * MS, facts={"details": broken, "ceilings": ceilings()}))
    assert found.saving_ns == pytest.approx(2 * 300_000)
    assert "2 graph breaks" in found.title
    again = Details(steps=1, compiled=CompiledRegions(frames=("0/0", "0/1"), calls=2.0, compiling_ns=8 * MS))
    compiling = seen(GOOD, waits={COMPILATION: 8 * MS}, facts={"details": again})
    assert graph_breaks.check(compiling).saving_ns == pytest.approx(8 * MS)
    assert graph_breaks.check(seen(GOOD, late=10 * MS, facts={"details": again})).saving_ns == 0  # the GPU did not wait
    one = Details(
        steps=1, compiled=CompiledRegions(frames=("0/0",), calls=12.0)
    )  # one block, compiled once, used twelve times
    assert graph_breaks.check(seen(GOOD, late=10 * MS, facts={"details": one})) is None


def test_exposed_communication():
    talks = ("backward", "communication", "", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 9 * MS, 4.0)
    alone = Details(steps=1, communication_ns=9 * MS, exposed_communication_ns=6 * MS)
    found = exposed_communication.check(seen(GOOD, talks, facts={"details": alone}))
    assert found.saving_ns == pytest.approx(6 * MS)
    assert "ncclDevKernel" in found.evidence[0]
    hidden = Details(steps=1, communication_ns=9 * MS)
    assert exposed_communication.check(seen(GOOD, talks, facts={"details": hidden})) is None


def test_what_the_gpu_saves_beside_a_busy_host_is_not_the_steps():
    """A GPU at work for 56 of 65 ms, a host for 60: the step ends with the host."""
    timed = point("op:matmul", wall=65 * MS, launch=60 * MS, busy=56 * MS)
    facts = Facts(
        explanation=explained(("forward", "matmul", "", SGEMM, 40 * MS, 9.0), step=65 * MS),
        point=timed,
        gpu=seen(GOOD).gpu,
    )
    found = fp32_matmul.check(facts)
    assert found.saving_ns == pytest.approx(5 * MS)
    assert drawn(found) == pytest.approx(40 * MS * (1 - 66.9 / 989.4))
    assert "by itself 5.00 ms" in found.arithmetic


# --- what the host does, and copies


def blame(cause, what, ns, **more):
    return HostBlame(cause=cause, what=what, idle_ns=ns, count=1.0, **more)


def test_host_code():
    prepare = blame(
        HOST, "lib/data.py(3): preprocess", 30 * MS, stack=("train.py(9): step",), inner={"decode": 20 * MS}
    )
    (found,) = host_code.check(seen(GOOD, waits={HOST: 30 * MS}, blame=(prepare,)))
    assert (found.saving_ns, found.evidence_ns, found.draws_on) == (30 * MS, 30 * MS, {IDLE_HOST: 30 * MS})
    assert found.title == "the GPU waits for preprocess (data.py:3): 30.0 ms"
    assert "called by train.py(9): step" in found.evidence
    assert "DataLoader" in found.code
    logs = (blame(HOST, "log.py(1): write", 20 * MS), blame(HOST, OUTSIDE, 5 * MS), blame(HOST, "x.py(1): f", 1 * MS))
    first, second = host_code.check(seen(GOOD, waits={HOST: 26 * MS}, blame=logs))
    assert (first.code, second.confidence) == ("", "low")  # no loader helps with a log; nobody is named
    assert host_code.check(seen(GOOD)) == ()


def test_host_code_is_counted_without_the_profiler():
    """Traced the GPU waits 40 ms for it, untraced for half of that."""
    slow = seen(GOOD, waits={HOST: 40 * MS}, blame=(blame(HOST, "data.py(3): load", 40 * MS),))
    alone = msgspec.structs.replace(slow.explanation.idle, total_ns=int(20 * MS), by_cause_ns={HOST: int(20 * MS)})
    facts = msgspec.structs.replace(slow, explanation=msgspec.structs.replace(slow.explanation, untraced_idle=alone))
    (found,) = host_code.check(facts)
    assert (found.saving_ns, found.values["traced_ns"]) == (20 * MS, 40 * MS)


@pytest.mark.parametrize(("calls", "word"), [(400.0, "CACHING"), (3.0, "expandable_segments")])
def test_allocator_calls(calls, word):
    details = Details(steps=1, allocator_calls={"cudaFree": calls})
    found = allocator_calls.check(seen(GOOD, waits={ALLOCATOR: 15 * MS}, facts={"details": details}))
    assert (found.saving_ns, word in found.code) == (15 * MS, True)
    assert allocator_calls.check(seen(GOOD, facts={"details": details})) is None


def test_cold_kernels():
    loads = blame(COMPILATION, "hipLaunchKernel", 12 * MS, stack=("aten::add_",))
    found = cold_kernels.check(seen(GOOD, waits={COMPILATION: 12 * MS}, blame=(loads,)))
    assert (found.saving_ns, found.evidence) == (12 * MS, ("12.0 ms in aten::add_ → hipLaunchKernel",))
    assert cold_kernels.check(seen(GOOD)) is None


def moved(kind, exposed, size):
    return Transfer(kind=kind, count=2.0, bytes=size, gpu_ns=exposed, exposed_ns=exposed)


def test_exposed_transfers_hide_behind_other_work_and_no_further():
    """4 GB at 40 ms a GB: 80 ms; out of pinned memory 50 a GB a second. The GPU's other 15 ms can hide 15 of them."""
    up = seen(("forward", "matmul", "", BF16, 95 * MS, 10.0), transfers=(moved("HtoD", 80 * MS, 8e8),))
    found = exposed_transfers.check(up)
    assert (found.saving_ns, found.evidence_ns) == (pytest.approx((80 - (40 - 15)) * MS), 80 * MS)
    assert "non_blocking=True" in found.code
    down = exposed_transfers.check(seen(GOOD, transfers=(moved("DtoH", 10 * MS, 0.0),)))
    assert (down.saving_ns, "pin_memory=True" in down.code, "to the host" in down.title) == (10 * MS, True, True)
    staged = exposed_transfers.check(seen(GOOD, waits={TRANSFER: 7 * MS}))
    assert staged.saving_ns == 7 * MS
    assert exposed_transfers.check(seen(GOOD, transfers=(moved("HtoD", 0.0, 8e8),))) is None


TALK = ("backward", "communication", "", "ncclDevKernel_SendRecv", 9 * MS, 4.0)


@pytest.mark.parametrize(
    ("kind", "phase", "word"),
    [
        ("all-reduce", "backward", "DistributedDataParallel"),
        ("all-gather", "backward", "prefetch"),
        ("reduce-scatter", "backward", "prefetch"),
        ("all-to-all", "backward", "all_to_all_single"),
        ("send and receive", "backward", "n_microbatches"),
        ("all-to-all", "forward", "fewer GPUs"),
        ("all-reduce", "forward", "fewer GPUs"),
    ],
)
def test_advice_on_communication_is_by_its_kind(kind, phase, word):
    alone = Details(steps=1, communication_ns=9 * MS, exposed_communication_ns=9 * MS, collectives={kind: 9 * MS})
    found = exposed_communication.check(seen(("forward", *GOOD[1:]), (phase, *TALK[1:]), facts={"details": alone}))
    assert word in found.code
    assert kind in found.title


@pytest.mark.parametrize(
    ("name", "code"), [("AdamW", "AdamW("), ("SGD", "torch.optim.SGD("), ("Shampoo", None), ("FusedAdam", None)]
)
def test_only_optimizers_with_a_fused_form_are_told_of_it(name, code):
    found = slow_optimizer.check(seen(GOOD, FOREACH, facts={"details": Details(steps=1, optimizers=(name,))}))
    assert (found is None) == (code is None)
    assert code is None or code in found.code


def test_an_optimizer_of_another_library_is_fused_already():
    apex = (
        "optimizer",
        "optimizer",
        "",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
        20 * MS,
        9.0,
    )
    assert slow_optimizer.check(seen(GOOD, apex)) is None


def test_communication_in_the_optimizer_is_not_the_optimizers_time():
    talks = ("optimizer", "communication", "", "ncclDevKernel_AllGather", 30 * MS, 4.0)
    found = slow_optimizer.check(seen(GOOD, FOREACH, talks))
    assert found.values["spent_ns"] == 20 * MS


def test_replays_are_not_captured_again_and_inference_is_not_trained():
    late = {"late": 60 * MS, "step": 150 * MS}
    assert launch_bound.check(seen(GOOD, graph_share=0.9, **late)) is None
    inference = launch_bound.check(seen(("forward", *GOOD[1:]), **late))
    assert "inference_mode" in inference.code
    assert "train_step" not in inference.code
