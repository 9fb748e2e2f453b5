"""Flash attention: values and gradients against float64, in every shape the model and its users bring."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.kernels import attention_tiles
from flopwise.kernels.attention import FlashAttention, attention_reference, tiled_backward, tiled_forward
from flopwise.kernels.attention_backward import DKDV, DQ, launch_backward
from flopwise.kernels.attention_tiles import Config, Problem, choose, lined_up, tma_ready
from flopwise.kernels.attention_triton import (
    FORWARD,
    FlashAttentionTriton,
    cases,
    flash_attention,
    flash_backward,
    flash_forward,
    launch_forward,
)

# relative error in the 2-norm; on a GPU fp32 products are exact unless TF32 is allowed
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# B, Hq, Hkv, T, Tk, D
SHAPES = {
    "cpu": [(1, 1, 1, 1, 1, 16), (2, 2, 1, 5, 5, 8), (1, 1, 1, 33, 33, 24), (1, 1, 1, 17, 40, 16), (1, 1, 1, 40, 17, 16)],
    "cuda": [
        (1, 1, 1, 1, 1, 16), (2, 2, 1, 5, 5, 8), (1, 3, 3, 129, 129, 96), (2, 8, 2, 1000, 1000, 64),
        (1, 4, 4, 2048, 2048, 128), (1, 4, 1, 777, 1500, 80), (1, 4, 2, 1500, 777, 128), (1, 2, 2, 513, 513, 32),
    ],
}  # fmt: skip
CPU_SHAPES = SHAPES["cpu"]
SMALL_TILES = [Config(16, 16, 4, 2), Config(32, 16, 4, 2), Config(16, 32, 4, 2)]


def draw(shape, dtype, device, seed=0):
    """q, k, v and the output's gradient."""
    batch, heads, key_heads, length, keys, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(heads, length), (key_heads, keys), (key_heads, keys), (heads, length)]
    return [torch.randn(batch, h, t, head_dim, generator=generator).to(device, dtype) for h, t in sizes]


def truth(q, k, v, grad, causal, window=None, scale=None):
    """Output and gradients of the definition, in float64."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    output = attention_reference(*wide, causal, window, scale)
    return output.detach(), *torch.autograd.grad(output, wide, grad.double())


def distance(found, right):
    """Relative, except where the right answer is near 0: the inputs are of size 1."""
    return float((found.double() - right).norm() / right.norm().clamp_min(0.1 * max(1, right.numel()) ** 0.5))


def assert_close(found, right, tolerance):
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, right, strict=False):
        assert a.shape == b.shape
        assert distance(a, b) <= tolerance, name
        assert torch.isfinite(a).all(), name


def with_gradients(attend, q, k, v, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = attend(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


def pairwise(*axes):
    """All combinations. A third of them, in which every two values of two short axes meet, is quick; the rest is slow."""
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        marks = [pytest.mark.slow] if sum(places) % 3 else []
        yield pytest.param(*(axis[n] for axis, n in zip(axes, places, strict=True)), marks=marks)


def shapes(device):
    return SHAPES["cuda" if device == "cuda" else "cpu"]


@pytest.mark.parametrize(
    ("index", "causal", "dtype"), list(pairwise(range(len(SHAPES["cuda"])), [False, True], list(TOLERANCE)))
)
def test_values_and_gradients_are_those_of_the_definition(device, index, causal, dtype):
    if index >= len(shapes(device)) or (device == "cpu" and dtype == torch.float16 and index != 2):
        pytest.skip("a shape for the GPU")
    q, k, v, grad = draw(shapes(device)[index], dtype, device)
    found = with_gradients(lambda *x: flash_attention(*x, causal=causal), q, k, v, grad)
    # the gradient goes through P and dS in the input's dtype: an eager pass in that dtype loses as much
    assert_close(found, truth(q, k, v, grad, causal), TOLERANCE[dtype])


@pytest.mark.parametrize(("config", "window", "late"), list(pairwise(SMALL_TILES, [None, 19], [False, True])))
def test_every_walk_over_several_tiles(device, config, window, late):
    """Tiles before, on and after the diagonal, with and without copy-engine loads, tails on both axes, a group of 2."""
    for tma, lengths in (
        ((False, (52, 52)), (True, (41, 64))) if device == "cuda" else ((False, (36, 36)), (True, (33, 48)))
    ):
        q, k, v, grad = draw((1, 2, 2 if late else 1, *lengths, 16), torch.float32, device)  # a group is never late
        problem = Problem(True, window, 0.3)
        tiles = config._replace(tma=tma, late=late)
        output, logsumexp = launch_forward(q, k, v, problem, tiles)
        found = output, *launch_backward(grad, q, k, v, output, logsumexp, problem, tiles, tiles)
        assert_close(found, truth(q, k, v, grad, True, window, 0.3), 1e-5)


@pytest.mark.parametrize("lengths", [pytest.param((36, 36), marks=pytest.mark.slow), (17, 25)])
def test_every_walk_without_a_mask(device, lengths):
    q, k, v, grad = draw((1, 1, 1, *lengths, 16), torch.float32, device)
    problem = Problem(False, None, 0.25)
    for late in (False, True):
        tiles = SMALL_TILES[1]._replace(late=late)
        output, logsumexp = launch_forward(q, k, v, problem, tiles)
        found = output, *launch_backward(grad, q, k, v, output, logsumexp, problem, tiles, tiles)
        assert_close(found, truth(q, k, v, grad, False, None, 0.25), 1e-5)


def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(device):
    q, k, v, grad = draw((1, 1, 1, 40, 8, 16), torch.float32, device)
    found = with_gradients(lambda *x: flash_attention(*x, causal=True, window=3), q, k, v, grad)
    assert_close(found, truth(q, k, v, grad, True, 3), 1e-5)
    assert not found[0][:, :, 10:].any()
    assert not found[1][:, :, 10:].any()
    logsumexp = flash_forward(q, k, v, True, 3, 0.25)[1]
    assert torch.isneginf(logsumexp[:, :, 10:]).all()
    assert torch.isfinite(logsumexp[:, :, :10]).all()


def test_no_element_is_left_unwritten(device, monkeypatch):
    """Memory from the allocator holds NaN here; what a kernel forgets to write stays NaN."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
    poisoned = []

    def poison(x):
        poisoned.append(x)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    q, k, v, grad = draw((1, 2, 1, 19, 18, 24), torch.float32, device)
    problem = Problem(True, None, 0.2)
    output, logsumexp = launch_forward(q, k, v, problem, SMALL_TILES[0])
    grads = launch_backward(grad, q, k, v, output, logsumexp, problem, SMALL_TILES[0], SMALL_TILES[0])
    assert len(poisoned) >= 6  # O, L, Δ and three gradients
    for x in (output, logsumexp, *grads):
        assert torch.isfinite(x).all()


def test_transposed_views_are_read_and_written_in_their_own_layout(device):
    """The model's [B, T, H, D] as [B, H, T, D]: no copy in, and the output has q's layout, so none out."""
    packed = torch.randn(2, 20, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(device)
    q, k, v = (packed[:, :, n].transpose(1, 2) for n in range(3))
    grad = torch.ones((), device=device).expand(q.shape)  # of sum(): all strides 0
    found = with_gradients(lambda *x: flash_attention(*x, causal=True), q, k, v, grad)
    assert_close(found, truth(q, k, v, grad, True), 1e-5)
    assert found[0].transpose(1, 2).is_contiguous()
    swapped = q.mT.contiguous().mT  # the head dimension is not the last in memory
    assert_close([flash_attention(swapped, k, v, causal=True)], truth(q, k, v, grad, True), 1e-5)


def test_rows_that_start_anywhere_are_lined_up(device, poison):
    """The kernels read rows on multiples of 16 elements alone; what pads a copy's rows is not read."""
    large = Config(32, 64, 4, 2)
    q, k, v, grad = draw((1, 2, 1, 70, 70, 20), torch.bfloat16, device)
    problem = Problem(True, 30, 0.2)
    output, logsumexp = launch_forward(q, k, v, problem, large)
    found = output, *launch_backward(grad, q, k, v, output, logsumexp, problem, large, large)
    assert_close(found, truth(q, k, v, grad, True, 30, 0.2), TOLERANCE[torch.bfloat16])
    for x in (q, torch.randn(1, 2, 3, 33, dtype=torch.bfloat16, device=device)[..., 1:]):
        copy = lined_up(x, large)
        assert torch.equal(copy, x)
        assert {stride % 16 for stride in copy.stride()[:-1]} == {copy.data_ptr() % 16} == {0}
        assert lined_up(copy, large) is copy
        assert tma_ready(lined_up(x, large._replace(tma=True)))


def test_every_tile_that_is_chosen_is_compiled_for_its_chip(monkeypatch):
    """With a window over grouped heads of odd lengths, which takes the most registers."""
    checked = set()
    for case in cases():
        if case.name.endswith("grouped window odd"):
            fixed = case.constexprs["C"]
            tiles = (fixed.block_d, fixed.block_m, fixed.block_n, fixed.tma)
            checked |= {(case.kernel.__name__, arch, *tiles, case.num_warps, case.num_stages) for arch in case.archs}
    tables = {"_flash_forward_kernel": FORWARD, "_flash_dkdv_kernel": DKDV, "_flash_dq_kernel": DQ}
    for arch, (name, table), head_dim in itertools.product((80, 90, 100), tables.items(), (64, 128, 256)):
        monkeypatch.setattr(attention_tiles, "architecture", lambda _, arch=arch: arch)
        config = choose(table, torch.empty(1, 1, 999, head_dim - 5, dtype=torch.bfloat16, device="meta"), 999)
        tile = config.block_m, config.block_n, config.tma, config.warps, config.stages
        assert (name, arch, head_dim, *tile) in checked


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)], ids=str)
def test_nothing_to_attend_to(device, sizes):
    batch, heads, length, keys = sizes
    q, k, v, grad = draw((batch, heads, heads, length, keys, 16), torch.float32, device)
    output, dq, dk, dv = with_gradients(lambda *x: flash_attention(*x, causal=False), q, k, v, grad)
    assert (output.shape, dq.shape, dk.shape, dv.shape) == (q.shape, q.shape, k.shape, v.shape)
    assert not any(x.any() for x in (output, dq, dk, dv))


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=4, deadline=None, phases=[Phase.generate])  # shrinking takes minutes in the interpreter
def test_any_shape(device, data):
    heads = data.draw(st.sampled_from([1, 2]))
    shape = (data.draw(st.integers(1, 2)), 2, heads, *data.draw(st.tuples(*[st.integers(1, 40)] * 2)), 16)
    causal = data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(1, 40)) if causal else None
    q, k, v, grad = draw(shape, torch.float32, device)
    found = with_gradients(lambda *x: flash_attention(*x, causal=causal, window=window), q, k, v, grad)
    assert_close(found, truth(q, k, v, grad, causal, window), 1e-5)


@pytest.mark.parametrize("function", [FlashAttention, FlashAttentionTriton])
@pytest.mark.parametrize("heads", [(), (2,)])
def test_the_functions_keep_only_the_logsumexp_besides_inputs_and_output(device, function, heads):
    q, k, v = (torch.randn(2, *heads, 20, 16, device=device, requires_grad=True) for _ in range(3))
    output = function.apply(q, k, v, True)
    kept = [x for x in output.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
    assert len(output.grad_fn.saved_tensors) == 5
    assert len(kept) == 1
    scores = (q @ k.mT / 4).masked_fill(torch.ones(20, 20, dtype=torch.bool, device=device).triu(1), -math.inf)
    torch.testing.assert_close(kept[0], torch.logsumexp(scores, -1).detach(), rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(output)
    found = output.detach(), *torch.autograd.grad(output, (q, k, v), grad)
    assert_close(found, truth(q, k, v, grad, True), 1e-5)
    assert distance(function.apply(q, k, v).detach(), truth(q, k, v, grad, False)[0]) < 1e-5  # not causal unless told


@pytest.mark.slow
def test_the_ops_are_registered_as_torch_wants_them(device):
    q, k, v, grad = draw((1, 2, 1, 6, 6, 16), torch.float32, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(flash_forward, (*leaves, True, None, 0.25))
    output, logsumexp = flash_forward(q.detach(), k.detach(), v.detach(), True, 4, 0.25)
    torch.library.opcheck(
        flash_backward,
        (grad, q.detach(), k.detach(), v.detach(), output, logsumexp, True, 4, 0.25),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_torch_compile_takes_it_whole(device):
    q, k, v, grad = draw((1, 2, 1, 9, 9, 16), torch.float32, device)
    compiled = torch.compile(lambda *x: flash_attention(*x, causal=True) * 2, fullgraph=True, backend="aot_eager")
    eager = with_gradients(lambda *x: flash_attention(*x, causal=True) * 2, q, k, v, grad)
    for a, b in zip(with_gradients(compiled, q, k, v, grad), eager, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_a_cuda_graph_replays_it(device):
    if device != "cuda":
        pytest.skip("CUDA graphs")
    q, k, v, grad = draw((1, 4, 2, 256, 256, 64), torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step():
        output = flash_attention(*leaves, causal=True)
        return output, *torch.autograd.grad(output, leaves, grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    assert_close([x.detach() for x in captured], truth(q, k, v, grad, True), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_worse_than_sdpa_in_half_precision(device, head_dim):
    if device != "cuda":
        pytest.skip("compares kernels")
    q, k, v, grad = draw((1, 8, 8, 1024, 1024, head_dim), torch.bfloat16, device)
    right = truth(q, k, v, grad, True)
    ours = with_gradients(lambda *x: flash_attention(*x, causal=True), q, k, v, grad)
    theirs = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), q, k, v, grad)
    for a, b, c in zip(ours, theirs, right, strict=True):
        assert distance(a, c) <= 1.5 * distance(b, c)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(device):
    if device != "cuda" or torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs a large GPU")
    wide = torch.zeros(1, 1 << 16, 520, 128, dtype=torch.bfloat16, device=device)  # [B, T, H, D]: 4.4e9 elements
    q = wide.transpose(1, 2)[:, -8:]
    q.normal_()
    output = flash_attention(q[:, -1:], q[:, -1:], q[:, -1:], causal=True, window=64)
    last = q[:, -1:, -256:]
    right = attention_reference(last.double(), last.double(), last.double(), True, 64)
    assert distance(output[:, :, -128:], right[:, :, -128:]) < 1e-2


# The eager path, which needs neither a GPU nor the interpreter.


@pytest.mark.parametrize("shape", CPU_SHAPES, ids=str)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)])
def test_the_tiled_version_is_the_definition(shape, causal, window):
    q, k, v, grad = (x.double() for x in draw(shape, torch.float32, "cpu"))
    output, logsumexp = tiled_forward(q, k, v, causal, window, 0.3, tile=8)
    found = output, *tiled_backward(grad, q, k, v, output, logsumexp, causal, window, 0.3, tile=8)
    assert_close(found, truth(q, k, v, grad, causal, window, 0.3), 1e-12)


def test_the_definition_is_torchs(monkeypatch):
    q, k, v, _ = (x.double() for x in draw((2, 4, 2, 9, 13, 8), torch.float32, "cpu"))
    for causal in (False, True):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(attention_reference(q, k, v, causal), theirs)


def test_float64_gradients_are_right_to_the_last_digit():
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal=True, window=3), (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: FlashAttention.apply(*x, True), (q, k, v))


def test_autocast_decides_the_dtype_as_for_sdpa():
    q = torch.randn(1, 2, 4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention(q, q, q, causal=True).dtype == torch.bfloat16


def test_flops_are_counted_as_pytorch_counts_its_own():
    q, k = torch.randn(1, 4, 32, 16, requires_grad=True), torch.randn(1, 4, 32, 16, requires_grad=True)
    with FlopCounterMode(display=False) as ours:
        flash_attention(q, k, k, causal=True).sum().backward()
    assert ours.get_total_flops() == 4 * 4 * 32 * 32 * 16 * 3.5


def test_what_cannot_be_done_is_refused():
    q = torch.randn(1, 3, 4, 16)
    refused = [{"window": 0}, {"window": 2.5}, {"window": 2, "causal": False}, {"scale": 0.0}, {"scale": math.nan}]
    for arguments in refused:
        with pytest.raises(Unsupported, match=r"window|scale"):
            flash_attention(q, q, q, **({"causal": True} | arguments))
    with pytest.raises(Unsupported, match="no gradient for its scale"):
        flash_attention(q, q, q, causal=True, scale=torch.tensor(0.5, requires_grad=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q: (q, q[:, :2], q[:, :2]), "a multiple of those"),
        (lambda q: (q, q[:, :0], q[:, :0]), "at least 1"),
        (lambda q: (q, q[..., :8], q[..., :8]), "one head dimension"),
        (lambda q: (q[..., :0],) * 3, "at least 1"),
        (lambda q: (q, q[0], q[0]), "q is"),
        (lambda q: (q, q[:1], q[:1]), "q is"),
        (lambda q: (q, q[:, :, :2], q), "q is"),
        (lambda q: (q, q.half(), q.half()), "one dtype"),
        (lambda q: (q.int(),) * 3, "int32 has no kernel"),
        (lambda q: (q, q.to("meta"), q.to("meta")), "on cpu and meta"),
    ],
)
def test_what_is_no_attention_is_refused_by_all_three(change, said):
    q, k, v = change(torch.randn(2, 3, 4, 16))
    for attend in (FlashAttention.apply, FlashAttentionTriton.apply, functools.partial(flash_attention, causal=True)):
        with pytest.raises(FlopwiseError, match=said):
            attend(q, k, v)


def test_a_head_wider_than_the_kernels_is_refused_where_they_run(device):
    for dtype, head_dim in ((torch.float32, 256), (torch.bfloat16, 512)):
        q = torch.randn(1, 1, 2, head_dim, device=device, dtype=dtype)
        with pytest.raises(Unsupported, match="head dimension"):
            flash_attention(q, q, q, causal=True)


@pytest.mark.parametrize("function", [FlashAttention, FlashAttentionTriton])
def test_a_second_derivative_is_refused(function):
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function.apply(q, q, q, True).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_on_the_meta_device_it_has_a_shape():
    q = torch.empty(2, 3, 5, 16, device="meta", requires_grad=True)
    output = flash_attention(q, q, q, causal=True)
    output.sum().backward()
    assert output.shape == q.grad.shape == q.shape


def test_more_sequences_than_a_launch_takes_are_refused(device):
    for shape in ((65536, 1, 1, 16), (1, 65536, 1, 16), (65536, 1, 16)):
        q = torch.ones(1, device=device).expand(shape)
        with pytest.raises(Unsupported, match="at most 65535"):
            flash_attention(q, q, q, causal=True)
