"""Ops that skip torch's dispatcher in eager mode: the same values and gradients, and seen by whoever follows ops."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.kernels.direct_op import direct_op


@direct_op("flopwise_tests::scaled_square")
def scaled_square(x: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * x * x


@scaled_square.register_fake
def _(x, factor):
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


scaled_square.register_autograd(
    lambda ctx, grad: (2 * ctx.factor * ctx.saved_tensors[0] * grad, None), setup_context=keep
)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def result(call=scaled_square):
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = call(x, 3.0)
    y.sum().backward()
    return y.tolist(), x.grad.tolist()


def test_eager_followed_profiled_and_compiled_give_the_same():
    expected = ([3.0, 12.0], [6.0, -12.0])
    assert result() == expected
    with Seen() as seen:
        assert result() == expected
    assert "flopwise_tests::scaled_square" in seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert result() == expected
    assert "flopwise_tests::scaled_square" in {event.key for event in profile.key_averages()}
    assert result(torch.compile(scaled_square, backend="aot_eager", fullgraph=True)) == expected


def test_in_eager_mode_the_dispatcher_is_not_asked(monkeypatch):
    def asked(*args):
        raise RuntimeError("the dispatcher was asked")

    monkeypatch.setattr(scaled_square, "op", asked)
    assert scaled_square(torch.ones(1), 1.0).tolist() == [1.0]
    with Seen(), pytest.raises(RuntimeError, match="was asked"):
        scaled_square(torch.ones(1), 1.0)
