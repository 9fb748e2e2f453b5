"""The chunked loss is the full loss, in less memory."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.lm.loss import loss_chunked, loss_full

N, D, V = 2 * 35, 24, 211  # D < N: no gradient is as large as the logits


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 35, D, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, D, generator=generator)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (2, 35), generator=generator)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = torch.nn.functional.cross_entropy((h @ w.T).flatten(0, 1), targets.flatten())
    return loss, *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 69, 70, 71, 10_000])
def test_chunked_equals_full_for_every_chunk_and_remainder(chunk_tokens: int) -> None:
    hidden, weight, targets = problem()
    loss = loss_chunked(hidden, weight, targets, chunk_tokens)
    expected, *gradients = exact(hidden, weight, targets)
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(loss, loss_full(hidden @ weight.T, targets))
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(loss_chunked(hidden, weight, targets, chunk_tokens), loss)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "pure"])
def test_half_precision_keeps_dtypes_and_accuracy(dtype: torch.dtype, tolerance: float, pure: bool) -> None:
    hidden, weight, targets = problem(dtype if pure else torch.float32)
    with torch.autocast("cpu", dtype, enabled=not pure):
        loss = loss_chunked(hidden, weight, targets, 32)
    assert loss.dtype == torch.float32
    expected, *gradients = exact(hidden, weight, targets)
    assert abs(loss.item() - expected.item()) < tolerance * expected.item()
    for x, got, want in zip((hidden, weight), torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
        assert got.dtype == x.dtype
        assert (got.double() - want).norm() < tolerance * want.norm()


def test_the_upstream_gradient_scales_and_may_come_twice() -> None:
    hidden, weight, targets = problem()
    loss = loss_chunked(hidden, weight, targets, 32)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = torch.autograd.grad(loss * 65536, (hidden, weight))
    for small, large in zip(once, scaled, strict=True):
        torch.testing.assert_close(small * 65536, large)


def test_gradients_do_not_vanish_in_fp16_for_a_long_batch() -> None:
    """With 1/N folded in before fp16, (p − y)/N of an unlikely token would be below fp16's smallest number."""
    generator = torch.Generator().manual_seed(0)
    tokens, vocab = 4096, 2000
    hidden = torch.randn(tokens, 8, generator=generator).requires_grad_()
    weight = (0.3 * torch.randn(vocab, 8, generator=generator)).requires_grad_()
    targets = torch.randint(0, 4, (tokens,), generator=generator)  # the rest of the vocabulary has small gradients only
    with torch.autocast("cpu", torch.float16):
        loss = loss_chunked(hidden, weight, targets, 1024)
    (got,) = torch.autograd.grad(loss, weight)
    logits = hidden.detach().double() @ weight.detach().double().T
    want = (
        (torch.softmax(logits, -1) - torch.nn.functional.one_hot(targets, vocab)).T @ hidden.detach().double() / tokens
    )
    assert (got.double() - want)[4:].norm() < 5e-3 * want[4:].norm()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.numel = max(self.numel, x.numel() if isinstance(x, Tensor) else 0)
        return out


@pytest.mark.parametrize("autocast", [False, True])
def test_the_logits_are_never_whole_in_memory(autocast: bool) -> None:
    hidden, weight, targets = problem()
    with Largest() as full, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_full(hidden @ weight.T, targets).backward()
    assert full.numel == N * V  # the meter sees them where they are
    with Largest() as chunked, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_chunked(hidden, weight, targets, 10).backward()
    assert chunked.numel == max(10 * V, D * V)


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = problem()
    with Largest() as largest, torch.no_grad():
        loss = loss_chunked(hidden, weight, targets, 10)
    assert not loss.requires_grad
    assert largest.numel < 1 + max(10 * V, D * V)
    with torch.no_grad(), _Count("mm") as count:
        loss_chunked(hidden, weight, targets, 10)
    assert count.calls == 7  # one matmul per chunk, not three
    with _Count("mm") as count:
        loss_chunked(hidden, weight, targets, 10)
    assert count.calls == 21


class _Count(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += func.overloadpacket.__name__ == self.name
        return func(*args, **(kwargs or {}))


def test_chunked_never_asks_the_host() -> None:
    """A value read back, or a shape that depends on one, would break a CUDA graph; fake tensors have no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden = torch.zeros(2, 35, D, requires_grad=True)
        weight = torch.zeros(V, D, requires_grad=True)
        loss = loss_chunked(hidden, weight, torch.zeros(2, 35, dtype=torch.long), 32)
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.shape == (V, D)


def test_the_gradient_survives_a_later_use_of_the_weight_in_the_same_autocast() -> None:
    """Autocast keeps a cast weight for reuse; one made without a graph would cut the later use off."""
    hidden, weight, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss_chunked(hidden, weight, targets, 32)
        loss_full(hidden.detach() @ weight.T, targets).backward()
    assert weight.grad is not None
    assert weight.grad.norm() > 0
