"""The dry run's parts, each against a truth of its own: torch's headers, its profiler, its allocator's law, a real trace."""

import contextlib
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flopwise.capture.build import build_step
from flopwise.capture.watch.modules import ModuleNames
from flopwise.capture.watch.tape import ALLOC
from flopwise.capture.watch.tracker import Tracker
from flopwise.errors import FlopwiseError
from flopwise.predict.dry import cuda_autocast as policy
from flopwise.predict.dry.architecture import architecture, architecture_of
from flopwise.predict.dry.cuda_ops import Attention, choose_backend, cuda_ops
from flopwise.predict.dry.extend import shallow_depth
from flopwise.predict.dry.fake_step import run_twice, tolerant_modules
from flopwise.predict.dry.known_numbers import KnowingFakeMode
from flopwise.predict.dry.replay import PlainAllocator, play
from flopwise.predict.dry.run import dry_run
from flopwise.predict.shapes.step import account_step, sdpa_backend, workspace_bytes
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload
from flopwise.work.allocator import CachingAllocator
from flopwise.work.op_rules import list_launches

MIB = 1 << 20
CPU = torch.device("cpu")
ADDS = ("aten::add", "aten::add_", "aten::scatter", "aten::scatter_")  # what autograd does in place, if it can


# The CPU is the truth: the same step on real tensors, and what its allocator reports.


def tape_on_cpu(work, fake):
    """The step's tape with the CPU's own ops and policy, on fake or on real tensors."""
    names = ModuleNames()
    with contextlib.ExitStack() as stack:
        stack.enter_context(names.watched())
        if fake:
            stack.enter_context(tolerant_modules())
            stack.enter_context(FakeTensorMode())
        tracker = Tracker(names)
        stack.enter_context(tracker.watching_optimizers())
        stack.enter_context(tracker)
        run_twice(tracker, lambda: build_step(work, CPU).phases)
    return tracker.tape


def profiled(work):
    """Peak bytes and counts of some ops of a third step, as torch's profiler reports them without any mode."""
    phases = build_step(work, CPU).phases
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(3):
            with torch.profiler.record_function("whole step"):
                for run in phases.values():
                    run()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    steps = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == "whole step"]
    begun, _ = steps[-1]
    live, start, peak = 0, 0, 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            start = live if event.start_ns() < begun else start
            peak = max(peak, live) if event.start_ns() >= begun else 0
    added = Counter(e.name for e in profile.events() if e.name in ADDS)
    return peak - start, {name: count // 3 for name, count in added.items()}


@pytest.mark.parametrize(
    "options", [{"optimizer": "adamw-loop", "attention": "naive", "norm": "eager"}, {"checkpoint": 1}]
)
def test_fake_tensors_live_and_die_like_real_ones_and_as_the_profiler_says(options):
    work = workload("tiny", context=32, set={"n_layers": 1}, **options)
    played = []
    for fake in (True, False):
        tape = tape_on_cpu(work, fake)
        played.append((tape, play(tape, ["all"] * len(tape.storages), PlainAllocator(), repeats=0)))
    (fake_tape, fake), (real_tape, real) = played
    assert [fake_tape.ops[n].work for n in fake.ops] == [real_tape.ops[n].work for n in real.ops]
    assert fake.live == real.live
    assert fake.memory == real.memory
    peak, added = profiled(work)
    # Within the few scalars that the CPU's ops make for themselves, and the optimizer's step counts.
    assert fake.peak.total_bytes - fake.memory[0].start_bytes == pytest.approx(peak, abs=256)
    if options.get("optimizer") == "adamw-loop":  # the foreach optimizer adds tensor by tensor on the CPU
        ours = Counter(f"aten::{fake_tape.ops[n].work.op}" for n in fake.ops)
        assert {name: ours[name] for name in ADDS if ours[name]} == added


# Autocast.


def test_the_policy_is_the_one_in_torchs_header():
    """Of an older torch: a part of it."""
    lists = policy.installed_lists()
    if not lists:
        pytest.skip("this torch comes without its headers")
    known = policy.LOWER_PRECISION, policy.FP32, policy.FP32_SET_DTYPE, policy.PROMOTE
    for name, ops in zip(("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"), known, strict=True):
        assert [op for op in lists[name] if op not in ops and "imname" not in op] == []  # named tensors, until 2.12
        assert lists[name] == ops or torch.__version__ < "2.13"


def test_ops_get_the_dtypes_that_cuda_autocast_gives_them():
    with policy.cuda_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
        weight = torch.randn(8, 8, requires_grad=True)
        h = F.linear(torch.randn(4, 8), weight)
        half = (h, h * 2, torch.tanh(h), h.mean(), F.silu(h), torch.einsum("ij,kj->ik", torch.randn(4, 8), weight))
        full = (
            h**3, h.exp(), h.sum(-1), F.softmax(h, -1), F.layer_norm(h, (8,)), h.norm(), h.norm(2, -1),
            torch.linalg.vector_norm(h), F.cross_entropy(h, torch.zeros(4, dtype=torch.long)), torch.addcmul(h, h, h.float()),
        )  # fmt: skip
        assert {t.dtype for t in half} == {torch.bfloat16}
        assert {t.dtype for t in full} == {torch.float32}
    h.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_a_weight_is_cast_once_and_kept_until_autocast_is_left():
    names = ModuleNames()
    with policy.cuda_autocast(), FakeTensorMode():
        weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
        tracker = Tracker(names)
        with tracker, torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for _ in range(3):
                    x @ weight
                inside = len(tracker._live)
            assert inside == 1  # the weight's cast; the others are gone
            assert not tracker._live
    casts = [op.work for op in tracker.tape.ops if op.work.op == "_to_copy"]
    assert sum(work.shapes[0] == (8, 8) for work in casts) == 1
    assert sum(work.shapes[0] == (4, 8) for work in casts) == 3


# Attention.


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "mask", "hopper", "ampere"),
    [
        (torch.bfloat16, 64, 4, None, "cudnn", "flash"),
        (torch.bfloat16, 64, 2, None, "cudnn", "flash"),
        (torch.bfloat16, 60, 4, None, "flash", "flash"),
        (torch.float16, 256, 4, None, "flash", "flash"),
        (torch.float32, 64, 4, None, "efficient", "efficient"),
        (torch.float32, 64, 2, None, "math", "math"),
        (torch.float16, 512, 4, "plain", "efficient", "efficient"),
        (torch.float64, 64, 4, None, "math", "math"),
        (torch.bfloat16, 64, 4, "plain", "cudnn", "efficient"),
        (torch.bfloat16, 64, 4, "learnt", "efficient", "efficient"),
        (torch.float32, 64, 4, "learnt", "efficient", "efficient"),
        (torch.float32, 64, 4, "heads last", "math", "math"),  # as T5 has its bias: seen in a trace of an H200
        (torch.bfloat16, 64, 4, "heads last", "math", "math"),
    ],
)
def test_the_backend_is_the_one_the_gpu_would_choose(dtype, head_dim, kv_heads, mask, hopper, ampere):
    q, k = torch.empty(1, 4, 8, head_dim, dtype=dtype), torch.empty(1, kv_heads, 8, head_dim, dtype=dtype)
    bias = None
    if mask is not None:
        bias = torch.empty(8, 8, 4, dtype=dtype, requires_grad=mask == "learnt").permute(2, 0, 1)[None]
        bias = bias if mask == "heads last" else bias.contiguous()
    assert choose_backend(q, k, k, bias, architecture("hopper")) == hopper
    assert choose_backend(q, k, k, bias, architecture("ampere")) == ampere


@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "saved"),
    [
        # out, log-sum-exp, two scalars of the random state
        ("cudnn", torch.bfloat16, 16, [2 * 4 * 20 * 16 * 2, 2 * 4 * 20 * 4, 8, 8]),
        # the padded q, k, v and out; the state has three numbers
        ("flash", torch.bfloat16, 12, [2 * 4 * 20 * 16 * 2] * 4 + [2 * 4 * 20 * 4, 16, 8]),
        # rows of the log-sum-exp come in multiples of 32
        ("efficient", torch.float32, 16, [2 * 4 * 20 * 16 * 4, 2 * 4 * 32 * 4, 8, 8]),
    ],
)
def test_a_backend_saves_what_it_saves_on_the_gpu(backend, dtype, head_dim, saved):
    names = ModuleNames()
    with cuda_ops(Attention(architecture("hopper"), held_to=backend)), FakeTensorMode():
        q, k, v = (torch.randn(2, 4, 20, head_dim, dtype=dtype, requires_grad=True) for _ in "qkv")
        tracker = Tracker(names)
        with tracker:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            there = sorted(tracker.tape.storages[number].nbytes for number, _ in tracker._live.values())
            assert there == sorted(saved)
            out.sum().backward()
        assert q.grad.shape == q.shape


# The allocator.


def test_blocks_are_rounded_and_cut_as_the_caching_allocator_does():
    gpu = CachingAllocator()
    gpu.allocate(1)
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (512, 2 * MIB)
    gpu.allocate(5 * MIB)
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (512 + 5 * MIB, 22 * MIB)
    gpu.allocate(25 * MIB)  # rounded up to 2 MiB: one is left, too little to cut off
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (512 + 31 * MIB, 48 * MIB)
    assert gpu.allocate(0) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60 * MIB), st.integers(0, 10)), max_size=40))
def test_the_allocator_gives_every_byte_once_and_gets_all_back(requests):
    gpu, blocks = CachingAllocator(), []
    for nbytes, drop in requests:
        blocks.append(gpu.allocate(nbytes))
        assert blocks[-1].size >= nbytes
        if drop < len(blocks):
            gpu.free(blocks.pop(drop))
        spans = sorted((b.address, b.address + b.size) for b in blocks)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert gpu.allocated_bytes == sum(b.size for b in blocks) <= gpu.reserved_bytes
    for block in blocks:
        gpu.free(block)
    assert gpu.allocated_bytes == 0
    assert sum(size for sizes in gpu._free.values() for size, _ in sizes) == gpu.reserved_bytes


# Architectures.


@pytest.mark.parametrize(
    "name", ["v100", "t4", "a100", "rtx3090", "l4", "h100", "h200", "b200", "rtx5090", "mi210", "mi300x"]
)
def test_a_gpu_has_the_workspace_and_the_attention_of_the_shape_simulator(name):
    """A past bug: Blackwell had Hopper's workspace, and its GeForce cards cuDNN's attention."""
    one = gpu(name)
    known = architecture(architecture_of(one))
    assert known.workspace_bytes == workspace_bytes(one)
    assert known.attention[0] == sdpa_backend("sdpa", "bf16", one)


# Bytes, FLOPs and launches.


def test_a_scatter_in_place_moves_what_it_touches():
    """A past bug: each moved the whole tensor."""
    t, rows, two = torch.empty(1000, 8), torch.empty(2, 8), torch.zeros(2, dtype=torch.long)
    some, whole = 2 * 8 * 4, 1000 * 8 * 4  # bytes of two rows, of all
    calls = (
        (16 + some, some, lambda: t.index_copy_(0, two, rows)),
        (16 + 2 * some, some, lambda: t.index_add_(0, two, rows)),
        (16, some, lambda: t.index_fill_(0, two, 1.0)),
        (16 + some, some, lambda: t.index_put_((two,), rows)),
        (16 + 2 * some, some, lambda: t.index_put_((two,), rows, accumulate=True)),
        (16 + 8, 8, lambda: t.index_put_((two, two), rows[0, :2])),
        (16, 8, lambda: t.scatter_(0, two[:, None], 1.0)),
        (16 + 2 * 8, 8, lambda: t.scatter_add_(0, two[:, None], rows)),
        (whole + 1000 * 8 + 4, whole, lambda: t.index_put_((torch.empty_like(t, dtype=torch.bool),), rows[0, 0])),
    )
    for read, written, call in calls:
        with FakeTensorMode(allow_non_fake_inputs=True), Tracker(ModuleNames()) as tracker:
            call()
        work = tracker.tape.ops[-1].work
        assert (work.op, work.read_bytes, work.write_bytes) == (work.op, read, written)


def test_matmuls_that_torchs_counter_leaves_out_have_flops():
    """A past silence: each of these had none."""
    a, stack, vector = torch.empty(4, 8), torch.empty(3, 4, 8), torch.empty(8)
    out, half = torch.empty(4, 4), {"dtype": torch.bfloat16}
    groups = torch.zeros(3, dtype=torch.int32)
    calls = (
        (64, lambda: a.mv(vector)),
        (16, lambda: vector.dot(vector)),
        (64, lambda: torch.addmv(out[0], a, vector)),
        (3 * 256, lambda: torch.addbmm(out, stack, stack.mT)),
        (3 * 256, lambda: out.addbmm_(stack, stack.mT)),
        (256, lambda: out.addmm_(a, a.T)),
        (2 * 32 * 16 * 8, lambda: torch._int_mm(torch.empty(32, 16).char(), torch.empty(16, 8).char())),
        (
            2 * 32 * 16 * 8,
            lambda: torch._grouped_mm(torch.empty(32, 16, **half), torch.empty(3, 8, 16, **half).mT, groups),
        ),
        (
            2 * 32 * 16 * 8,
            lambda: torch._grouped_mm(torch.empty(3, 32, 16, **half), torch.empty(8, 16, **half).T, groups),
        ),
    )
    for flops, call in calls:
        with FakeTensorMode(allow_non_fake_inputs=True), Tracker(ModuleNames()) as tracker:
            call()
        assert sum(op.work.flops for op in tracker.tape.ops) == flops


def test_foreach_launches_are_those_in_an_h200s_trace():
    """tests/trace/fixtures/h200-small-fp32-naive-2steps: each `_foreach_` op over small's parameters is seven kernels."""
    block = [768 * 768] * 4 + [768 * 3072] * 3 + [768] * 2
    sizes = [10_000 * 768, *block * 12, 768, 10_000 * 768]
    assert sum(sizes) == workload("small").subject.parameters()
    assert [list_launches(sizes, lists) for lists in (1, 2, 3)] == [7, 7, 7]


@given(st.lists(st.integers(1, 30_000_000), max_size=80), st.integers(1, 5))
def test_a_launch_takes_no_more_chunks_and_tensors_than_it_can(sizes, lists):
    chunks = sum(-(-size // 65_536) for size in sizes)
    most = (110, 64, 48, 36, 30)[lists - 1]
    found = list_launches(sizes, lists)
    assert max(-(-chunks // 320), -(-len(sizes) // most)) <= found <= -(-chunks // 320) + -(-len(sizes) // most)


@given(st.integers(1, 300), st.integers(0, 9))
def test_a_shallow_model_ends_like_the_deep_one(layers, checkpoint):
    depth, per_unit = shallow_depth(layers, checkpoint), checkpoint or 1
    if depth is None:
        assert -(-layers // per_unit) <= 6
    else:
        assert (layers - depth) % per_unit == 0  # so the last segment is as long
        assert -(-depth // per_unit) == 5


def test_a_tape_frees_what_it_allocated_and_nothing_else():
    tape = tape_on_cpu(workload("tiny", context=16, set={"n_layers": 1}), fake=True)
    seen = set()
    for section in tape.sections():
        for kind, number in section.events:
            if kind == ALLOC:
                assert number not in seen
                seen.add(number)
            elif kind == 1:
                assert number in seen


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_shape_simulator_and_dry_run_agree_on_bytes_with_a_large_vocabulary(loss):
    """A past bug: the dry run read AdamW's gradients twice in one operation, and log probabilities for their shape."""
    w = workload("tiny", set={"vocab": 50_257}, batch=2, context=200, loss=loss)
    told, dry = (sum(op.read_bytes + op.write_bytes for op in x.ops) for x in (account_step(w), dry_run(w)))
    assert told == pytest.approx(dry, rel=0.03)


def test_positions_have_values_and_other_numbers_are_taken_as_one():
    with KnowingFakeMode() as fake:
        positions = torch.arange(1000)
        assert isinstance(positions, FakeTensor)
        assert bool((positions.diff() == 1).all())
        assert int(torch.ones(3, dtype=torch.int64).cumsum(0)[-1]) == 3
        assert not fake.guessed
        assert torch.randn(3).sum().item() == 1.0
        x = torch.randn(2, 3)
        assert bool(torch.isfinite(x).all())
        assert not bool(torch.isnan(x).any())
        assert not bool(((x < -2) | (x > 2)).view(-1).any())  # torch.nn.init.trunc_normal_ draws again while it is so
        assert fake.guessed == 4
        assert torch.arange(2**30).constant is None  # too many


def test_a_loop_that_waits_for_values_is_refused():
    def wait():
        while torch.randn(3).sum().item() < 2:
            pass

    with KnowingFakeMode(), pytest.raises(FlopwiseError, match="over and over"):
        wait()
