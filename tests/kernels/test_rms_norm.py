"""RMSNorm: rows of every length, with and without the residual's addition, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.kernels import rms_norm as module
from flopwise.kernels.rms_norm import add_rms_norm, rms_norm
from flopwise.kernels.rms_norm_forward import launch_forward

EPS = 1e-5
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {
    "cpu": [(1,), (1, 1), (3, 7), (2, 70, 16), (5, 2049)],
    "cuda": [(1,), (4099, 7), (4, 16, 2048, 128), (16384, 4096), (300, 3, 5000), (2048, 8192)],
}
LONG = {"cpu": (2, 8200), "cuda": (1000, 16385)}


def truth(x, residual, weight, dy, dtotal):
    """(y, total, dx, dresidual, dweight) in fp64."""
    inputs = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    total = inputs[0] + inputs[1]
    y = total / torch.sqrt(total.square().mean(-1, keepdim=True) + EPS) * inputs[2]
    return y, total, *torch.autograd.grad((y, total), inputs, (dy.double(), dtotal.double()))


def check_alone(x, weight, dy, error):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    zero = torch.zeros_like(x)
    y, _, dx, _, dweight = truth(x, zero, weight, dy, zero)
    found = rms_norm(x, weight, EPS)
    found.backward(dy)
    assert (found.dtype, x.grad.dtype, weight.grad.dtype) == (x.dtype, x.dtype, weight.dtype)
    assert error(found, y) <= BOUNDS[x.dtype]
    if x.shape[-1] > 1:  # the norm of one element is its sign: its slope is all rounding
        assert error(x.grad, dx) <= BOUNDS[x.dtype]
    assert error(weight.grad, dweight) <= BOUNDS[x.dtype]


def check_added(x, residual, weight, dy, dtotal, error):
    inputs = [t.detach().requires_grad_() for t in (x, residual, weight)]
    results = add_rms_norm(*inputs, EPS)
    torch.autograd.backward(results, (dy, dtotal))
    expected = truth(x, residual, weight, dy, dtotal)
    for found, exact in zip((*results, *(t.grad for t in inputs)), expected, strict=True):
        assert error(found, exact) <= BOUNDS[x.dtype]
    for t in inputs:
        assert t.grad.dtype == t.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_value_and_gradients_are_those_in_fp64(dtype, device, error, poison):
    for shape in SHAPES[device]:
        x, residual, dy, dtotal = ((1 + torch.randn(shape, device=device)).to(dtype) for _ in range(4))
        dy = dy / 4  # 131,072 rows of it must not be more than fp16 can hold
        weight = 1 + torch.rand(shape[-1], device=device)  # fp32 beside any x, as under autocast
        check_alone(x, weight, dy, error)
        check_alone(x, weight.to(dtype), dy, error)
        check_added(x, residual, weight, dy, dtotal, error)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_rows_too_long_for_registers(dtype, device, error, poison):
    x, residual, dy, dtotal = (torch.randn(LONG[device], device=device).to(dtype) for _ in range(4))
    weight = torch.rand(x.shape[-1], device=device)
    check_alone(x, weight, dy, error)
    check_added(x, residual, weight, dy, dtotal, error)


@pytest.mark.parametrize("columns", [1025, 1500, 2560, 2600, 3072, 3073, 4096, 4100, 5120, 6144])
def test_rows_in_two_parts_give_the_same(columns, device, error, poison):
    x, residual = (torch.randn(5, columns, device=device) for _ in range(2))
    weight = torch.rand(columns, device=device)
    for other in (None, residual):
        y, total, inverse = launch_forward(x, other, weight, EPS)
        exact = total.double()
        assert torch.equal(total, x if other is None else x + other)
        assert error(inverse, exact.square().mean(-1).add(EPS).rsqrt()) <= 1e-5
        assert error(y, exact * inverse[:, None].double() * weight) <= BOUNDS[x.dtype]


def test_a_residual_in_fp32_beside_bf16_stays_in_fp32(device, error):
    x = torch.randn(6, 40, device=device).bfloat16()
    residual, dy, dtotal = (torch.randn(6, 40, device=device) for _ in range(3))
    y, total = add_rms_norm(x, residual, torch.ones(40, device=device), EPS)
    assert (y.dtype, total.dtype) == (torch.float32, torch.float32)
    assert torch.equal(total, residual + x)
    check_added(x, residual, torch.rand(40, device=device), dy, dtotal, error)


def test_heads_seen_through_a_transposed_view_are_not_copied(device, error):
    x = torch.randn(2, 5, 3, 16, device=device).transpose(1, 2)  # [B, H, T, D] as a projection leaves it
    assert rms_norm(x, torch.ones(16, device=device), EPS).stride() == x.stride()
    dense = torch.randn(x.shape, device=device)
    check_alone(x, torch.rand(16, device=device), dense, error)
    check_added(x, dense, torch.rand(16, device=device), dense, x, error)
    check_added(dense, x, torch.rand(16, device=device), x, x, error)


def test_other_strides_and_empties(device, error):
    x = torch.randn(6, 9, 40, device=device)
    for view in (x[..., 5:21], x[::2], x.transpose(1, 2), x[:, :1].expand(6, 4, 40), x[..., ::2]):
        check_alone(view, torch.rand(view.shape[-1], device=device), torch.randn(view.shape, device=device), error)
    for shape in ((0, 4), (4, 0), (2, 0, 8)):
        empty = torch.empty(shape, device=device, requires_grad=True)
        weight = torch.ones(shape[-1], device=device, requires_grad=True)
        y, total = add_rms_norm(empty, empty, weight, EPS)
        (rms_norm(empty, weight, EPS) + y + total).sum().backward()
        assert empty.grad.shape == shape
        assert weight.grad.eq(0).all()


def test_either_result_may_go_unused(device):
    x, weight = torch.randn(4, 20, device=device, requires_grad=True), torch.ones(20, device=device)
    (of_y,) = torch.autograd.grad(add_rms_norm(x, torch.zeros_like(x), weight, EPS)[0].square().sum(), x)
    (alone,) = torch.autograd.grad(rms_norm(x, weight, EPS).square().sum(), x)
    torch.testing.assert_close(of_y, alone)
    (of_total,) = torch.autograd.grad(add_rms_norm(x, torch.zeros_like(x), weight, EPS)[1].sum(), x)
    assert torch.equal(of_total, torch.ones_like(x))


def test_the_weights_gradient_is_the_same_every_time(device):
    x, dy = torch.randn(500, 64, device=device, requires_grad=True), torch.randn(500, 64, device=device)
    weight = torch.ones(64, device=device, requires_grad=True)
    grads = [torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), dy) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 5), st.integers(1, 140), st.sampled_from([0.25, 8.0, 1024.0]))
def test_a_scaled_row_gives_the_same(rows, columns, scale):
    on = "cuda" if torch.cuda.is_available() else "cpu"
    x = 1 + torch.rand(rows, columns, device=on)
    weight = torch.rand(columns, device=on)
    torch.testing.assert_close(rms_norm(scale * x, weight, 0.0), rms_norm(x, weight, 0.0))


@pytest.mark.slow
def test_the_ops_keep_torchs_rules(device):
    x = torch.randn(2, 3, 10, device=device)
    weight, ops = torch.rand(10, device=device, requires_grad=True), torch.ops.flopwise
    for view in (x, x.transpose(0, 1)):
        torch.library.opcheck(ops.rms_norm.default, (view.detach().requires_grad_(), weight, EPS))
    leaf = x.detach().requires_grad_()
    torch.library.opcheck(ops.add_rms_norm.default, (leaf, x.bfloat16(), weight, EPS))
    _, inverse = ops.rms_norm(x, weight.detach(), EPS)
    torch.library.opcheck(ops.rms_norm_backward.default, (x, None, x, weight.detach(), inverse))


def test_compiled_whole_it_gives_the_same(device):
    weight = torch.rand(50, device=device, requires_grad=True)

    def block(x):
        y, total = add_rms_norm(2 * x, x, weight, EPS)
        return (rms_norm(y, weight, EPS) + total).square().sum()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 50, device=device, requires_grad=True)
    found, expected = (torch.autograd.grad(run(x), (x, weight)) for run in (compiled, block))
    torch.testing.assert_close(found, expected)


def test_a_cuda_graph_replays_it_forward_and_backward(device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    x, weight = torch.randn(64, 1000, device=device, requires_grad=True), torch.rand(1000, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(rms_norm(x, weight, EPS).sum(), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (dx,) = torch.autograd.grad(rms_norm(x, weight, EPS).sum(), x)
    with torch.no_grad():
        x.normal_()
    graph.replay()
    torch.testing.assert_close(dx, torch.autograd.grad(module.rms_norm_reference(x, weight, EPS).sum(), x)[0])


def test_on_the_cpu_it_is_the_reference_with_its_gradients(error):
    x, residual, dy, dtotal = (torch.randn(3, 7, 20) for _ in range(4))
    check_alone(x, torch.rand(20), dy, error)
    check_added(
        x.transpose(0, 1), residual.transpose(0, 1), torch.rand(20), *(t.transpose(0, 1) for t in (dy, dtotal)), error
    )


def test_a_weight_that_does_not_fit_is_refused():
    with pytest.raises(FlopwiseError, match="weight"):
        rms_norm(torch.ones(2, 3), torch.ones(2), EPS)
    with pytest.raises(FlopwiseError, match="shape"):
        add_rms_norm(torch.ones(2, 3), torch.ones(3), torch.ones(3), EPS)


def test_of_float64_the_gradient_is_that_of_float64():
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: rms_norm(*given, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda *given: add_rms_norm(*given, 1e-5), (x, residual, weight))
