"""RoPE: a rotation of pairs, so that lengths stay and the gradient is the rotation back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.kernels.rope import rope, rope_pair, rope_reference
from flopwise.lm import layers

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {  # [B, T, H, D] as a projection leaves them
    "cpu": [(1, 1, 1, 2), (2, 5, 3, 6), (1, 40, 5, 64), (1, 3, 1, 80)],
    "cuda": [(1, 1, 1, 2), (2, 1023, 5, 80), (4, 2048, 16, 64), (2, 4096, 32, 128), (1, 300, 9, 256)],
}


def angles(context, dim, device):
    return layers.rope_angles(context, dim, 10000.0, torch.device(device))


def truth(x, cos, sin):
    return rope_reference(x.double(), cos.double(), sin.double())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_value_and_gradient_are_those_in_fp64(dtype, transposed, device, error, poison):
    for shape in SHAPES[device]:
        x = torch.randn(shape, device=device).to(dtype).transpose(1, 2)
        x = (x if transposed else x.contiguous()).requires_grad_()
        dy = torch.randn(x.shape, device=device).to(dtype)
        cos, sin = angles(x.shape[2], x.shape[3], device)
        y = rope(x, cos, sin)
        y.backward(dy)
        assert y.dtype == dtype
        assert all(a == b for a, b, size in zip(y.stride(), x.stride(), x.shape, strict=True) if size > 1)
        assert error(y, truth(x, cos, sin)) <= BOUNDS[dtype]
        assert error(x.grad, truth(dy, cos, -sin)) <= BOUNDS[dtype]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16))]
)
def test_queries_and_keys_in_one_launch(dtype, device, error, poison):
    q = torch.randn(2, 7, 9, 16, device=device).to(dtype).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 2, 7, 16, device=device).to(dtype).requires_grad_()
    cos, sin = angles(7, 16, device)
    yq, yk = rope_pair(q, k, cos, sin)
    (yq.sum() + (2 * yk).sum()).backward()
    for x, y, scale in ((q, yq, 1.0), (k, yk, 2.0)):
        assert error(y, truth(x, cos, sin)) <= BOUNDS[dtype]
        assert error(x.grad, truth(torch.full_like(x, scale), cos, -sin)) <= BOUNDS[dtype]
    (alone,) = torch.autograd.grad(rope_pair(q, k, cos, sin)[1].sum(), k)  # the queries' gradient is nothing
    assert error(alone, truth(torch.ones_like(k), cos, -sin)) <= BOUNDS[dtype]


def test_it_is_the_models_own_convention(device, error):
    x = torch.randn(2, 3, 6, 8, device=device)
    assert error(rope(x, *angles(6, 8, device)), layers.rope(x, *angles(6, 8, device))) <= 1e-6


def test_other_strides_and_empties(device, error):
    cos, sin = angles(9, 8, device)
    x = torch.randn(4, 6, 9, 24, device=device)
    strided = torch.randn(9, 8, 3, 2, device=device).permute(3, 2, 0, 1)
    for view in (x[..., 8:16], x[::2, 1::2, :, ::3], x[:, :1, :, :8].expand(4, 6, 9, 8), strided):
        assert error(rope(view, cos, sin), truth(view, cos, sin)) <= 1e-5
    for shape in ((0, 2, 9, 8), (2, 0, 9, 8)):
        empty = torch.empty(shape, device=device, requires_grad=True)
        rope(empty, cos, sin).sum().backward()
        assert empty.grad.shape == shape
    yq, yk = rope_pair(x[..., :8], torch.empty(4, 0, 9, 8, device=device), cos, sin)
    assert error(yq, truth(x[..., :8], cos, sin)) <= 1e-5
    assert yk.shape == (4, 0, 9, 8)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
def test_lengths_stay_and_turning_back_gives_the_same(heads, context, half):
    on = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1, heads, context, 2 * half, device=on)
    cos, sin = angles(context, 2 * half, on)
    y = rope(x, cos, sin)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rope(y, cos, -sin), x, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_ops_keep_torchs_rules(device):
    cos, sin = angles(5, 4, device)
    for x in (torch.randn(2, 3, 5, 4, device=device), torch.randn(2, 5, 3, 4, device=device).transpose(1, 2)):
        torch.library.opcheck(torch.ops.flopwise.rope.default, (x.requires_grad_(), cos, sin, False))
    torch.library.opcheck(torch.ops.flopwise.rope_pair.default, (x, x[:, :1].detach(), cos, sin, True))


def test_compiled_whole_it_gives_the_same(device):
    x, (cos, sin) = torch.randn(2, 5, 3, 4, device=device), angles(5, 4, device)

    def both(x):
        q = rope(2 * x.transpose(1, 2), cos, sin)
        return q, *rope_pair(q, q, cos, sin)

    for found, expected in zip(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_cuda_graph_replays_it(device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    x, (cos, sin) = torch.randn(2, 4, 100, 64, device=device), angles(100, 64, device)
    rope(x, cos, sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rope(x, cos, sin)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, rope_reference(x, cos, sin))


def test_on_the_cpu_the_gradient_is_the_derivative():
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    dy, (cos, sin) = torch.randn(1, 2, 3, 4), angles(3, 4, "cpu")
    (found,) = torch.autograd.grad(rope(x, cos, sin), x, dy)
    (exact,) = torch.autograd.grad(rope_reference(x, cos, sin), x, dy)
    torch.testing.assert_close(found, exact)


def test_angles_that_do_not_fit_are_refused():
    with pytest.raises(FlopwiseError, match="angles"):
        rope(torch.ones(1, 1, 3, 4), torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(FlopwiseError, match="even"):
        rope(torch.ones(1, 1, 3, 5), torch.ones(3, 2), torch.ones(3, 2))


def test_angles_that_are_learned_are_refused():
    """Their gradient would be dropped without a word."""
    x, (cos, sin) = torch.ones(1, 1, 3, 4), angles(3, 4, "cpu")
    cos.requires_grad_()
    for turn in (lambda: rope(x, cos, sin), lambda: rope_pair(x, x, cos, sin)):
        with pytest.raises(FlopwiseError, match="no gradient for its angles"):
            turn()
        with torch.no_grad():
            turn()


def test_more_sequences_than_a_launch_takes_are_refused(device):
    x, (cos, sin) = torch.ones(1, 1, 1, 2, device=device), angles(1, 2, device)
    for shape in ((65536, 1, 1, 2), (1, 65536, 1, 2)):
        with pytest.raises(FlopwiseError, match="at most 65535"):
            rope(x.expand(shape), cos, sin)
