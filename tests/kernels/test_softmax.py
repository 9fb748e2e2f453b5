"""Softmax: rows of every length, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.kernels import softmax as module
from flopwise.kernels.softmax import softmax, softmax_reference

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {
    "cpu": [(1, 1), (3, 7), (130, 16), (2, 2, 200), (2, 5000)],
    "cuda": [(1, 1), (4099, 7), (65536, 128), (2, 16, 300, 333), (4096, 4096), (257, 30001), (128, 32768)],
}
LONG = {"cpu": (1, 33000), "cuda": (300, 128257)}


def truth(x, dy):
    wide = x.detach().double().requires_grad_()
    y = torch.softmax(wide, -1)
    (dx,) = torch.autograd.grad(y, wide, dy.double())
    return y, dx


def check(x, error):
    dtype = x.dtype
    x = x.requires_grad_()
    dy = torch.randn(x.shape, device=x.device).to(dtype)
    y = softmax(x)
    y.backward(dy)
    expected, slope = truth(x, dy)
    assert (y.dtype, y.shape, x.grad.dtype) == (dtype, x.shape, dtype)
    assert error(y, expected) <= BOUNDS[dtype]
    # A gradient is a difference: what is lost is the saved output's rounding, which torch's kernel has as well.
    (theirs,) = torch.autograd.grad(torch.softmax(x, -1), x, dy)
    if x.shape[-1] > 1:
        slack = 2 if x.is_cuda else 6  # the interpreter cuts bf16 off where a GPU rounds: all of a row errs one way
        assert error(x.grad, slope) <= max(BOUNDS[dtype], slack * error(theirs, slope))
    else:
        assert x.grad.abs().max() <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_value_and_gradient_are_those_in_fp64(dtype, device, error, poison):
    for shape in SHAPES[device]:
        check((4 * torch.randn(shape, device=device)).to(dtype), error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_too_long_for_registers(dtype, device, error, poison):
    check((4 * torch.randn(LONG[device], device=device)).to(dtype), error)


def test_masked_elements_are_zero_and_a_wholly_masked_row_is_nan(device, monkeypatch):
    x = torch.randn(4, 300, device=device)
    x[0, 1:] = -torch.inf
    x[1, ::2] = -torch.inf
    x[2, :] = -torch.inf
    x[3, 5] = torch.nan
    expected = torch.softmax(x.double(), -1).float()
    torch.testing.assert_close(softmax(x), expected, equal_nan=True)
    monkeypatch.setattr(module, "FORWARD_COLUMNS", 16)  # the same in two passes
    monkeypatch.setattr(module, "LOOP_BLOCK", 128)
    torch.testing.assert_close(softmax(x), expected, equal_nan=True)


def test_strides_and_empties(device, error):
    x = torch.randn(6, 40, 33, device=device)
    for view in (x[:, :, 1:30], x[::2], x.transpose(0, 1), x.transpose(1, 2), x[:, :1, :].expand(6, 3, 33)):
        assert error(softmax(view), torch.softmax(view.double(), -1)) <= 1e-5
        dy = torch.randn(view.shape[::-1], device=device).permute(2, 1, 0)
        leaf = view.detach().requires_grad_()
        softmax(leaf).backward(dy)
        assert error(leaf.grad, truth(view, dy)[1]) <= 1e-5
    for shape in ((0, 4), (4, 0), (0,)):
        empty = torch.empty(shape, device=device, requires_grad=True)
        softmax(empty).sum().backward()
        assert empty.grad.shape == shape


def test_it_reads_bf16_and_writes_fp32_where_asked(device, error):
    x = torch.randn(5, 60, device=device).bfloat16().requires_grad_()
    y = softmax(x, torch.float32)
    y.square().sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.float32, torch.bfloat16)
    assert error(y, torch.softmax(x.double(), -1)) <= 1e-5
    if device == "cuda":
        with torch.autocast("cuda", torch.bfloat16):
            assert softmax(x).dtype == torch.softmax(x, -1).dtype


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 5), st.integers(1, 140), st.floats(-1e4, 1e4))
def test_a_shift_of_all_logits_changes_nothing_and_rows_sum_to_one(rows, columns, shift):
    on = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randint(-8, 8, (rows, columns), device=on).float()
    torch.testing.assert_close(softmax(x + round(shift)), softmax(x))
    torch.testing.assert_close(softmax(x).sum(-1), torch.ones(rows, device=on))


def test_the_ops_keep_torchs_rules(device):
    x = torch.randn(3, 5, 33, device=device)
    for view in (x, x.transpose(0, 1)):
        torch.library.opcheck(torch.ops.flopwise.softmax.default, (view.detach().requires_grad_(), torch.float32))
        torch.library.opcheck(torch.ops.flopwise.softmax_backward.default, (view, x.softmax(-1), torch.bfloat16))


def test_compiled_whole_it_gives_the_same(device):
    x = torch.randn(3, 50, device=device)
    compiled = torch.compile(lambda x: softmax(2 * x) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), softmax(2 * x) + 1)


def test_a_cuda_graph_replays_it(device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    x = torch.randn(64, 1000, device=device)
    softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(x, -1))


def test_on_the_cpu_the_gradient_is_the_derivative():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softmax_reference, x)
    dy = torch.randn(3, 7, dtype=torch.float64)
    (found,) = torch.autograd.grad(softmax(x.float()), x, dy.float())
    torch.testing.assert_close(found, truth(x, dy)[1], atol=1e-6, rtol=1e-4)


def test_a_dtype_of_whole_numbers_is_refused():
    with pytest.raises(FlopwiseError, match=r"int32 cannot hold"):
        softmax(torch.ones(2, 3), dtype=torch.int32)
