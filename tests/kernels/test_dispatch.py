"""What every operation refuses alike, on any machine, in one line that says why."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flopwise.errors import FlopwiseError
from flopwise.kernels.cross_entropy import cross_entropy
from flopwise.kernels.gelu import gelu_triton
from flopwise.kernels.rms_norm import add_rms_norm, rms_norm
from flopwise.kernels.rope import rope, rope_pair
from flopwise.kernels.softmax import softmax
from flopwise.kernels.swiglu import swiglu

ANGLES = torch.ones(3, 2), torch.ones(3, 2)
TARGETS = torch.zeros(2, 2, 3, dtype=torch.long)
# of one tensor x, and of a second one like it
OPERATIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "gelu": lambda x, y: gelu_triton(x),
    "softmax": lambda x, y: softmax(x),
    "swiglu": swiglu,
    "rms_norm": lambda x, y: rms_norm(x, y[0, 0, 0], 1e-5),
    "add_rms_norm": lambda x, y: add_rms_norm(x, y, torch.ones(4), 1e-5),
    "rope": lambda x, y: rope(x, *(a.to(y.device) for a in ANGLES)),
    "rope_pair": lambda x, y: rope_pair(x, y, *ANGLES),
    "cross_entropy": lambda x, y: cross_entropy(x, TARGETS.to(y.device)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_float_is_refused(name, dtype):
    x = torch.ones(2, 2, 3, 4).to(dtype)
    with pytest.raises(FlopwiseError, match=r"has no kernel: use torch\.float32"):
        OPERATIONS[name](x, x)


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"gelu", "softmax"}))
def test_tensors_of_two_devices_are_refused(name):
    x = torch.ones(2, 2, 3, 4)
    with pytest.raises(FlopwiseError, match="on one device"):
        OPERATIONS[name](x, x.to("meta"))


def test_the_reason_is_in_the_message():
    x = torch.ones(2, 2, 3, 4)
    for wrong, said in (
        (lambda: swiglu(x, x[0]), "two tensors of one shape"),
        (lambda: rope(x, *(a[:2] for a in ANGLES)), r"they are \[T, D/2\] each in fp32"),
        (lambda: rope(x[..., :3], *ANGLES), "an even D"),
        (lambda: rope_pair(x, x[:1], *ANGLES), "one batch"),
        (lambda: rms_norm(x, torch.ones(3), 1e-5), "one element for each"),
        (lambda: add_rms_norm(x, x[0], torch.ones(4), 1e-5), "does not broadcast"),
        (lambda: softmax(x.sum()), "a scalar has none"),
    ):
        with pytest.raises(FlopwiseError, match=said):
            wrong()


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,)])
def test_softmax_of_nothing_is_nothing(shape):
    x = torch.empty(shape, requires_grad=True)
    y = softmax(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
