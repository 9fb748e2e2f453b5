"""GeLU: five ways, one function."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import Unsupported
from flopwise.kernels.gelu import GELU, gelu_cuda, gelu_triton

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {"cpu": [(1,), (2, 2049), (4100,)], "cuda": [(1,), (3, 1000, 1001), (4096, 4096), (1 << 20,), (8191,)]}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def truth(x, dy):
    wide = x.detach().double().requires_grad_()
    y = F.gelu(wide, approximate="tanh")
    (dx,) = torch.autograd.grad(y, wide, dy.double())
    return y, dx


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", [CUDA, "triton"])
def test_value_and_gradient_are_those_in_fp64(name, dtype, device, error, poison):
    for shape in SHAPES[device]:
        x = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
        dy = torch.randn(shape, device=device).to(dtype)
        y = GELU[name](x)
        y.backward(dy)
        expected, slope = truth(x, dy)
        assert y.dtype == dtype
        assert error(y, expected) <= BOUNDS[dtype]
        assert error(x.grad, slope) <= BOUNDS[dtype]


@pytest.mark.parametrize("name", ["manual", "torch", "triton", pytest.param("compile", marks=CUDA.marks), CUDA])
def test_all_ways_agree(name, device, error):
    x = torch.linspace(-8, 8, 1000, device=device)
    assert error(GELU[name](x), truth(x, x)[0]) <= 1e-5


@pytest.mark.parametrize("name", ["triton", CUDA])
def test_far_from_zero_it_is_0_or_x_and_nan_stays_nan(name, device):
    x = torch.tensor([-3e38, -1e14, -60.0, 60.0, 1e14, 3e38, float("nan")], device=device, requires_grad=True)
    y = GELU[name](x)
    y.backward(torch.ones_like(x))
    assert y[:6].tolist() == F.relu(x)[:6].tolist()
    assert x.grad[:6].tolist() == [0, 0, 0, 1, 1, 1]
    assert y[6].isnan()
    assert x.grad[6].isnan()


@pytest.mark.parametrize("name", ["triton", CUDA])
def test_empty_and_views(name, device, error):
    assert GELU[name](torch.empty(0, 5, device=device)).shape == (0, 5)
    x = torch.randn(6, 70, device=device)
    for view in (x.T, x[:, ::2], x[1:, 1:], x.flatten()[1:], x[:, :1].expand(6, 9)):
        assert error(GELU[name](view), F.gelu(view.double(), approximate="tanh")) <= 1e-5


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40))
def test_every_element_is_within_a_few_ulp(values):
    x = torch.tensor(values)
    exact = F.gelu(x.double(), approximate="tanh")
    found = gelu_triton(x.cuda() if torch.cuda.is_available() else x).cpu().double()
    assert ((found - exact).abs() <= 2e-6 * x.abs().double() + 1e-30).all()


def test_the_ops_keep_torchs_rules(device):
    x = torch.randn(2, 33, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.flopwise.gelu.default, (x,))
    torch.library.opcheck(torch.ops.flopwise.gelu_backward.default, (x.detach(), x.detach().T.contiguous().T))
    if device == "cuda":
        torch.library.opcheck(torch.ops.flopwise.gelu_cuda.default, (x,))


@pytest.mark.parametrize("name", ["triton", CUDA])
def test_compiled_whole_it_gives_the_same(name, device):
    x = torch.randn(3, 50, device=device)
    compiled = torch.compile(lambda x: GELU[name](2 * x) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), GELU[name](2 * x) + 1)


@pytest.mark.parametrize("name", ["triton", CUDA])
def test_a_cuda_graph_replays_it(name, device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    x = torch.randn(1 << 16, device=device)
    GELU[name](x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = GELU[name](x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, F.gelu(x, approximate="tanh"))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    if device == "cpu" or torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs a GPU of 40 GiB")
    n = (1 << 31) + 4099
    for way in (gelu_triton, gelu_cuda):
        x = torch.zeros(n, device=device, dtype=torch.bfloat16)
        x[-5000:] = 1
        y = way(x)
        assert y[:-5000].count_nonzero() == 0
        assert (y[-5000:] == y[-1]).all()
        assert y[-1] > 0.8


def test_on_the_cpu_the_gradient_is_the_derivative():
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(GELU["manual"], x)
    (found,) = torch.autograd.grad(gelu_triton(x.float()).sum(), x)
    torch.testing.assert_close(found, truth(x, torch.ones(7))[1], atol=1e-5, rtol=1e-4)


def test_the_cuda_kernel_says_that_it_needs_a_gpu():
    with pytest.raises(Unsupported, match="GPU") as caught:
        gelu_cuda(torch.ones(3))
    assert "triton" in caught.value.hint
