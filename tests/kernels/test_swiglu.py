"""SwiGLU: silu(gate) · up, of whole tensors and of halves."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.kernels.swiglu import swiglu, swiglu_reference

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {"cpu": [(1,), (2, 3, 7), (2, 1300)], "cuda": [(1,), (3, 17, 1001), (8, 2048, 5632), (8192, 14336)]}


def truth(gate, up, dy):
    g, u = (x.detach().double().requires_grad_() for x in (gate, up))
    y = F.silu(g) * u
    return y, *torch.autograd.grad(y, (g, u), dy.double())


def check(gate, up, dy, error):
    dtype = gate.dtype
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = swiglu(gate, up)
    y.backward(dy)
    for found, expected in zip((y, gate.grad, up.grad), truth(gate, up, dy), strict=True):
        assert found.dtype == dtype
        assert error(found, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_value_and_gradients_are_those_in_fp64(dtype, device, error, poison):
    for shape in SHAPES[device]:
        check(*(torch.randn(shape, device=device).to(dtype) for _ in range(3)), error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_one_tensor(dtype, device, error, poison):
    both = torch.randn(3, 2, 80, device=device).to(dtype)
    gate, up = both.chunk(2, -1)
    check(gate, up, torch.randn(3, 2, 40, device=device).to(dtype), error)
    both.requires_grad_()
    swiglu(*both.chunk(2, -1)).backward(torch.ones(3, 2, 40, device=device, dtype=dtype))
    assert both.grad.isfinite().all()


def test_other_strides_and_empties(device, error):
    x = torch.randn(4, 6, 10, device=device)
    dy = torch.randn(6, 4, 10, device=device).transpose(0, 1)
    check(x, x.flip(0), dy, error)
    check(x[..., 1:8], torch.randn(4, 6, 12, device=device)[..., :7], torch.randn(4, 6, 7, device=device), error)
    check(x.transpose(1, 2), x.transpose(1, 2), dy.transpose(1, 2), error)
    check(x[:1].expand(4, 6, 10), x[:, :, :1].expand(4, 6, 10), dy, error)
    for shape in ((0, 4), (4, 0)):
        empty = torch.empty(shape, device=device, requires_grad=True)
        swiglu(empty, empty).sum().backward()
        assert empty.grad.shape == shape


def test_a_shut_gate_gives_zero_and_an_open_one_its_product(device):
    gate = torch.tensor([-200.0, -1e30, 200.0, 1e30], device=device)
    assert swiglu(gate, torch.ones_like(gate)).tolist() == F.relu(gate).tolist()


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 4), st.integers(1, 70), st.integers(0, 3))
def test_any_width_and_offset(rows, columns, offset):
    on = "cuda" if torch.cuda.is_available() else "cpu"
    gate, up = torch.randn(2, rows, columns + offset, device=on)[:, :, offset:]
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)


def test_the_ops_keep_torchs_rules(device):
    both = torch.randn(3, 66, device=device)
    gate, up = (x.detach().requires_grad_() for x in both.chunk(2, -1))
    torch.library.opcheck(torch.ops.flopwise.swiglu.default, (gate, up))
    torch.library.opcheck(torch.ops.flopwise.swiglu_backward.default, (up.detach(), gate.detach(), up.detach()))


def test_compiled_whole_it_gives_the_same(device):
    x = torch.randn(3, 50, device=device)
    compiled = torch.compile(lambda x: swiglu(*(2 * x).chunk(2, -1)) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), swiglu(*(2 * x).chunk(2, -1)) + 1)


def test_a_cuda_graph_replays_it(device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    gate, up = torch.randn(2, 64, 1000, device=device)
    swiglu(gate, up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = swiglu(gate, up)
    gate.normal_()
    graph.replay()
    torch.testing.assert_close(y, F.silu(gate) * up)


def test_on_the_cpu_the_gradient_is_the_derivative():
    gate, up, dy = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(swiglu_reference, (gate, up))
    found = torch.autograd.grad(swiglu(gate.float(), up.float()), (gate, up), dy.float())
    for mine, exact in zip(found, truth(gate, up, dy)[1:], strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-4)


def test_two_shapes_are_refused():
    with pytest.raises(FlopwiseError, match="alike"):
        swiglu(torch.ones(3), torch.ones(4))
