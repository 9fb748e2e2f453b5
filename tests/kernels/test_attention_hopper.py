"""Attention in Gluon, for sm_90 alone: right in every shape it takes, and left alone in every other."""

import builtins

import pytest
import torch
import triton

from flopwise.kernels import attention_backward, attention_gluon, attention_triton
from flopwise.kernels.attention import attention_reference, tiled_backward, tiled_forward
from flopwise.kernels.attention_gluon import gluon_kernels, gluon_on, trusted
from flopwise.kernels.attention_tiles import Problem

backward = gluon_kernels()
hopper = backward and backward.forward
pytestmark = pytest.mark.skipif(not backward, reason="a Triton whose Gluon is not known")
CAUSAL = Problem(True, None, 0.1)


def inputs(shape, dtype, device="cpu"):
    """q, k, v and the output's gradient."""
    batch, heads, key_heads, length, keys, head_dim = shape
    sizes = [(heads, length), (key_heads, keys), (key_heads, keys), (heads, length)]
    return [torch.randn(batch, h, t, head_dim, device=device, dtype=dtype) for h, t in sizes]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(256, 256), (300, 300), (700, 1000), (1000, 300), (65, 1), (1, 65)], ids=str)
@pytest.mark.parametrize(("heads", "dtype"), [((3, 3), torch.bfloat16), ((4, 2), torch.float16)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_and_gradients_are_those_of_the_definition(
    device, poison, monkeypatch, head_dim, heads, dtype, lengths, causal
):
    """Whole and broken tiles, more queries than keys and fewer, and heads in groups."""
    if device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for sm_90")
    monkeypatch.setattr(hopper, "LONG", 1)
    q, k, v, grad = inputs((2, *heads, *lengths, head_dim), dtype, device)
    problem = Problem(causal, None, 0.1)
    output, logsumexp = attention_triton.launch_forward(q, k, v, problem)
    found = output, *attention_backward.launch_backward(grad, q, k, v, output, logsumexp, problem)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    right = attention_reference(*exact, causal, None, 0.1)
    for a, b in zip(found, (right, *torch.autograd.grad(right, exact, grad.double())), strict=True):
        assert torch.isfinite(a).all()
        size = b.norm().clamp_min(0.1 * b.numel() ** 0.5)  # over a single key dQ and dK are 0
        assert (a.double() - b).norm() / size < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize(
    ("shape", "dtype", "window", "taken"),
    [
        ((1, 2, 2, 4096, 5000, 128), torch.bfloat16, None, (True, True)),
        ((1, 2, 2, 4096, 5000, 128), torch.float16, None, (True, True)),
        ((1, 2, 1, 4096, 5000, 128), torch.bfloat16, None, (True, False)),  # heads in groups
        ((1, 2, 2, 4096, 5000, 128), torch.bfloat16, 20, (False, False)),
        ((1, 2, 2, 4096, 5000, 128), torch.float32, None, (False, False)),
        ((1, 2, 2, 4096, 5000, 80), torch.bfloat16, None, (False, False)),
        ((1, 2, 2, 2048, 4000, 128), torch.bfloat16, None, (False, False)),  # short
    ],
)
def test_only_what_the_kernels_are_written_for_is_taken(shape, dtype, window, taken):
    q, k, v, grad = inputs(shape, dtype)
    problem = Problem(True, window, 0.1)
    assert (hopper.takes(q, k, v, problem), backward.takes(grad, q, k, v, problem)) == taken


def test_rows_that_the_copy_engine_cannot_read_are_not_taken():
    q, k, v, _ = inputs((1, 2, 2, 4096, 5000, 128), torch.bfloat16)
    shifted = torch.randn(1, 2, 5000, 129, dtype=torch.bfloat16)[..., 1:]
    assert not hopper.takes(q, shifted, v, CAUSAL)
    assert not backward.takes(shifted, q, k, v, CAUSAL)


def test_who_asks_for_the_same_result_at_every_run_gets_the_two_passes():
    q, k, v, grad = inputs((1, 2, 2, 4096, 5000, 128), torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert not backward.takes(grad, q, k, v, CAUSAL)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("version", "there"), [("3.6.0", True), ("3.7.1", True), ("3.8.0", False), ("3.5.1", False)])
def test_another_tritons_gluon_is_not_used(monkeypatch, version, there):
    monkeypatch.setattr(triton, "__version__", version)
    assert (gluon_kernels.__wrapped__() is not None) == there


def test_without_gluon_there_are_no_such_kernels(monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if "attention_hopper_backward" in (args[2] or () if len(args) > 2 else ()):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    assert gluon_kernels.__wrapped__() is not None
    monkeypatch.setattr(builtins, "__import__", without)
    assert gluon_kernels.__wrapped__() is None


@pytest.mark.parametrize(("arch", "there"), [(80, False), (90, True), (100, False)])
def test_other_chips_keep_the_triton_kernels(monkeypatch, arch, there):
    class Somewhere:
        is_cuda = True

    monkeypatch.setattr(attention_gluon, "architecture", lambda _: arch)
    assert (gluon_on(Somewhere()) is backward) == there
    assert gluon_on(torch.ones(1)) is None


class Played:
    """The kernels, played by the definition; `off` is added to one of the results, counted from the output on."""

    def __init__(self, wrong=None, off=0.0, fails=False):
        self.BACKWARD = {128: ()}
        self.wrong, self.off, self.fails, self.runs, self.forward = wrong, off, fails, 0, self

    def given(self, results, written, first):
        for n, (result, place) in enumerate(zip(results, written, strict=True), first):
            place.copy_(result + (self.off if n == self.wrong else 0.0))

    def forward_call(self, q, k, v, output, logsumexp, problem):
        def launch():
            self.runs += 1
            if self.fails:
                raise RuntimeError("out of resource: shared memory")
            self.given(tiled_forward(q, k, v, problem.causal, None, problem.scale), (output, logsumexp), 0)

        return type("Call", (), {"launch": staticmethod(launch)})

    def launch(self, grad, q, k, v, output, logsumexp, written, problem):
        self.given(tiled_backward(grad, q, k, v, output, logsumexp, problem.causal, None, problem.scale), written, 2)


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(attention_gluon, "_tried", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_that_are_right_at_first_are_trusted_and_tried_once(untried, causal, recwarn):
    played = Played()
    before = torch.get_rng_state()
    assert trusted(played, untried, causal)
    assert trusted(played, untried, causal)
    assert played.runs == 1
    assert not recwarn.list
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrong", range(5))
@pytest.mark.parametrize("off", [0.5, float("nan")])
def test_kernels_that_are_wrong_at_first_are_not_used_and_that_is_said(untried, wrong, off):
    played = Played(wrong, off)
    with pytest.warns(UserWarning, match="are not used, slower ones are: their first result is"):
        assert not trusted(played, untried, True)
    assert not trusted(played, untried, True)
    assert played.runs == 1


def test_kernels_that_cannot_run_are_not_used(untried):
    with pytest.warns(UserWarning, match="are not used, slower ones are: out of resource: shared memory"):
        assert not trusted(Played(fails=True), untried, True)


def test_a_first_use_inside_a_graph_takes_the_other_kernels_and_settles_nothing(untried, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    played = Played()
    assert not trusted(played, untried, True)
    assert played.runs == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert trusted(played, untried, True)
