"""Cross entropy equals its definition in float64, for any shape, and never holds all logits."""

import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flopwise.errors import FlopwiseError
from flopwise.kernels import cross_entropy as module
from flopwise.kernels.cross_entropy import IGNORED, chunk_rows, cross_entropy, linear_cross_entropy

# tokens, vocabulary, width, chunk: one row, one word, odd lengths, several blocks of a row, a last chunk of one token
SHAPES = {
    "cpu": [(1, 1, 1, None), (5, 33, 16, 4), (3, 9000, 3, 2), (4, 8192, 4, 4)],
    "cuda": [(1, 1, 1, None), (5, 33, 16, 4), (300, 50_257, 64, 128), (4097, 128_256, 256, 1024)],
}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _inputs(tokens: int, vocabulary: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).to(device).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).to(device).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    if tokens > 2:
        targets[1] = IGNORED
    return hidden, weight, targets


def _full_logits(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: float, dtype: torch.dtype) -> list[Tensor]:
    """Loss and gradients by autograd through all logits."""
    h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    logits = h @ w.T
    wide = logits.float() if dtype.itemsize < 4 else logits
    loss = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    (loss * upstream).backward()
    return [loss.detach(), h.grad, w.grad]


def _distance(found: Tensor, wanted: Tensor) -> float:
    scale = wanted.double().norm().item()
    return (found.double() - wanted.double()).norm().item() / scale if scale else found.double().norm().item()


@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_full_logits(device, dtype, shape):
    tokens, vocabulary, width, chunk = SHAPES[device][shape]
    hidden, weight, targets = _inputs(tokens, vocabulary, width, dtype, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    loss = linear_cross_entropy(hidden, weight, targets, chunk)
    (loss * 3).backward()  # an upstream gradient that is not 1
    found = [loss.detach(), hidden.grad, weight.grad]
    wanted = _full_logits(hidden, weight, targets, 3, torch.float64)
    eager = _full_logits(hidden, weight, targets, 3, dtype)
    assert loss.dtype == torch.float32
    assert [g.dtype for g in found[1:]] == [dtype, dtype]
    for ours, truth, theirs in zip(found, wanted, eager, strict=True):
        assert _distance(ours, truth) <= max(BOUNDS[dtype], 2 * _distance(theirs, truth))


@pytest.mark.slow
def test_a_sum_of_chunks_rounds_no_more_than_the_docstring_says(device):
    tokens, vocabulary, width = (64, 40, 16) if device == "cpu" else (8192, 4096, 512)
    hidden, weight, targets = _inputs(tokens, vocabulary, width, torch.bfloat16, device)
    linear_cross_entropy(hidden, weight, targets, tokens // module.NARROW_CHUNKS).backward()
    truth = _full_logits(hidden, weight, targets, 1, torch.float64)[2]
    theirs = _full_logits(hidden, weight, targets, 1, torch.bfloat16)[2]
    assert _distance(weight.grad, truth) <= 2.5 * _distance(theirs, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_cross_entropy_of_logits(device, dtype, strided):
    for vocabulary in (1, 33, 8195):
        logits = torch.randn(2, 3, 2 * vocabulary, dtype=torch.float64).to(dtype).to(device)
        logits = logits[..., :vocabulary] if strided else logits[..., :vocabulary].contiguous()
        targets = torch.randint(vocabulary, (2, 3)).to(device)
        targets[1, 1] = IGNORED
        ours, truth = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
        loss, wanted = cross_entropy(ours, targets), F.cross_entropy(truth.flatten(0, 1), targets.flatten())
        (loss * 5).backward()
        (wanted * 5).backward()
        assert _distance(loss.detach(), wanted.detach()) < 1e-6 or vocabulary == 1
        assert _distance(ours.grad, truth.grad) < BOUNDS[dtype]


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 7), st.floats(-60, 60), st.sets(st.integers(0, 5)))
def test_any_shape_any_size_of_logits(device, tokens, vocabulary, chunk, shift, ignored):
    hidden, weight, targets = _inputs(tokens, vocabulary, 4, torch.float32, device)
    with torch.no_grad():
        hidden += shift  # logits of hundreds: exp of them alone would be infinite
    for n in ignored:
        if 0 < n < tokens:
            targets[n] = IGNORED
    loss = linear_cross_entropy(hidden, weight, targets, chunk)
    loss.backward()
    wanted = _full_logits(hidden, weight, targets, 1, torch.float64)
    for ours, truth in zip([loss.detach(), hidden.grad, weight.grad], wanted, strict=True):
        assert torch.allclose(ours.double(), truth, rtol=1e-4, atol=2e-4 * (1 + abs(shift)))


def test_every_element_is_written(device, monkeypatch):
    """Memory that was never written would show: all that is allocated holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    hidden, weight, targets = _inputs(5, 1037, 8, torch.float32, device)
    linear_cross_entropy(hidden, weight, targets, 2).backward()
    logits = torch.randn(5, 1037, device=device, requires_grad=True)
    cross_entropy(logits, targets).backward()
    for gradient in (hidden.grad, weight.grad, logits.grad):
        assert gradient.isfinite().all()


def test_no_tokens_and_no_targets_are_as_torch_has_them(device):
    hidden, weight, _ = _inputs(4, 8, 4, torch.float32, device)
    loss = linear_cross_entropy(hidden[:0], weight, torch.empty(0, dtype=torch.long, device=device))
    loss.backward()
    assert loss.isnan()  # the mean of nothing, as F.cross_entropy says
    assert not weight.grad.any()
    ignored = torch.full((4,), IGNORED, device=device)
    hidden.grad = weight.grad = None
    linear_cross_entropy(hidden, weight, ignored).backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_target_that_is_no_word_is_seen(device):
    hidden, weight, targets = _inputs(2, 8, 4, torch.float32, device)
    logits = (hidden @ weight.T).detach().requires_grad_()
    for wrong in (1_000_000, 8, -1, -101):
        targets[0] = wrong
        loss = linear_cross_entropy(hidden, weight, targets)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert loss.isnan()
        assert gradients[0][0].isnan().all()
        assert gradients[1].isnan().all()
        loss = cross_entropy(logits, targets)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isnan()
        assert gradient[0].isnan().all()
        assert gradient[1].isfinite().all()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="of the reference")
@pytest.mark.parametrize("wrong", [8, -1, -101])
def test_a_target_that_is_no_word_is_refused_on_the_cpu(wrong):
    hidden, weight, targets = _inputs(2, 8, 4, torch.float32, "cpu")
    targets[0] = wrong
    with pytest.raises(ValueError, match=f"target {wrong} is none of 8 classes"):
        linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(ValueError, match=f"target {wrong} is none of 8 classes"):
        cross_entropy(hidden @ weight.T, targets)


@pytest.mark.parametrize("vocabulary", [8, 4100])
def test_logits_near_the_ends_of_fp32(device, vocabulary):
    """One far above all others, all of them alike and far from 0, and one that cannot be."""
    logits = torch.zeros(5, vocabulary, device=device)
    logits[0, 1], logits[1], logits[2], logits[3, 5] = 3e38, -2e30, 3e38, -torch.inf
    logits[4, :3] = torch.tensor([3e38, -3e38, 3e38])
    targets = torch.tensor([1, 2, 3, 4, 0], device=device)
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss, wanted = cross_entropy(ours, targets), F.cross_entropy(theirs, targets)
    loss.backward()
    wanted.backward()
    assert torch.allclose(loss.double(), wanted)
    assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-7)
    weight = torch.eye(5, device=device)[:, :5]
    hidden = logits[:, :5].clone().requires_grad_()
    hidden.data[3] = 0.0
    fused, wanted = linear_cross_entropy(hidden, weight, targets), F.cross_entropy(hidden.double(), targets)
    (gradient,) = torch.autograd.grad(fused, hidden)
    assert torch.allclose(fused.double(), wanted)
    assert torch.allclose(gradient, torch.autograd.grad(wanted, hidden)[0].float(), atol=1e-6)


def test_under_autocast_the_weights_gradient_stays_fp32(device):
    hidden, weight, targets = _inputs(7, 40, 16, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        linear_cross_entropy(hidden, weight, targets, 3).backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    found = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    with torch.autocast(device, dtype=torch.bfloat16):
        F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=IGNORED).backward()
    truth = _full_logits(hidden, weight, targets, 1, torch.float64)[1:]
    for ours, theirs, wanted in zip(found, [hidden.grad, weight.grad], truth, strict=True):
        assert _distance(ours, wanted) <= 2 * _distance(theirs, wanted)


def test_only_the_gradients_asked_for(device):
    hidden, weight, targets = _inputs(5, 9, 4, torch.float32, device)
    both = linear_cross_entropy(hidden, weight, targets)
    linear_cross_entropy(hidden, weight.detach(), targets, 2).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, targets)
    assert counter.get_total_flops() == 2 * 5 * 9 * 4
    assert torch.allclose(both, alone)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 9 * 4


def test_a_second_derivative_is_refused(device):
    """The gradients carry no graph: a penalty on them would be a constant, silently."""
    hidden, weight, targets = _inputs(5, 9, 4, torch.float32, device)
    loss = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(FlopwiseError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_where_no_row_counts_the_gradients_are_zero(device, dtype):
    for tokens in (4, 0):
        hidden, weight, _ = _inputs(4, 8, 4, dtype, device)
        ignored = torch.full((tokens,), IGNORED, device=device)
        loss = linear_cross_entropy(hidden[:tokens], weight, ignored)
        loss.backward()
        assert loss.isnan()
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_second_backward_pass_has_the_same_gradients(device):
    """Gradients are scaled in place where no other pass can follow: scaled twice they would be wrong, silently."""
    hidden, weight, targets = _inputs(5, 9, 4, torch.float32, device)
    found = []
    for loss_of in (linear_cross_entropy, lambda h, w, t: F.cross_entropy(h @ w.T, t)):
        loss = loss_of(hidden, weight, targets)
        first = torch.autograd.grad(loss * 2, (hidden, weight), retain_graph=True)
        (loss * 3).backward()
        found.append((*first, hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert all(torch.allclose(*both, atol=1e-6) for both in zip(*found, strict=True))


@pytest.mark.slow
def test_registered_ops(device):
    hidden, weight, targets = _inputs(5, 33, 4, torch.float32, device)
    # Not its AOT test: that hands out the gradients too, which the backward pass writes to. The next test has AOT.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (hidden, weight, targets, 2, torch.float32, True, True)
    torch.library.opcheck(module._linear_cross_entropy, arguments, test_utils=checks)
    torch.library.opcheck(module._scale, (torch.randn(5, device=device), torch.tensor(2.0, device=device)))
    logits = torch.randn(5, 33, device=device, requires_grad=True)
    torch.library.opcheck(module._cross_entropy, (logits, targets))


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])  # the latter cuts as Inductor does
def test_compiled_is_one_op_with_the_same_result(device, backend):
    hidden, weight, targets = _inputs(5, 33, 4, torch.float32, device)
    linear_cross_entropy(hidden, weight, targets, 2).mul(2).backward()
    wanted = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return linear_cross_entropy(h * 1, w, t, 2) * 2

    compiled(hidden, weight, targets).backward()
    assert torch.allclose(hidden.grad, wanted[0])
    assert torch.allclose(weight.grad, wanted[1])


def test_in_a_cuda_graph(device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    hidden, weight, targets = _inputs(300, 1000, 64, torch.bfloat16, device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 128), (hidden, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(hidden, weight, targets, 128)
        found = torch.autograd.grad(loss, (hidden, weight))
    with torch.no_grad():
        hidden.normal_()
    graph.replay()
    wanted = _full_logits(hidden, weight, targets, 1, torch.bfloat16)
    for ours, theirs in zip((loss.detach(), *found), wanted, strict=True):
        assert _distance(ours, theirs) < 1e-2


def test_peak_memory_is_an_eighth_of_full_logits(device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    hidden, weight, targets = _inputs(8192, 128_256, 1024, torch.bfloat16, device)

    def peak(step: object) -> int:
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step().backward()
        return torch.cuda.max_memory_allocated() - before

    full = peak(lambda: F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=IGNORED))
    assert peak(lambda: linear_cross_entropy(hidden, weight, targets)) <= full / 8


@pytest.mark.parametrize("vocabulary", [50_257, 50_304])
def test_gradients_are_as_exact_for_any_number_of_words(device, vocabulary):
    """Of 50,257 words cuBLAS sums in half precision, unless they are padded."""
    if device == "cpu":
        pytest.skip("cuBLAS's products")
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 256, device=device), 0.02 * torch.randn(vocabulary, 256, device=device)
    targets = torch.randint(0, vocabulary, (2048,), device=device)

    def gradient(dtype):
        leaf = hidden.to(dtype).requires_grad_()
        (found,) = torch.autograd.grad(linear_cross_entropy(leaf, weight.to(dtype), targets, 512), leaf)
        return found.double()

    exact, rounded = gradient(torch.float32), gradient(torch.bfloat16)
    assert (rounded - exact).norm() < 0.004 * exact.norm()


def test_on_the_cpu_the_reference_has_the_same_api():
    """Also where Triton does not interpret."""
    hidden, weight, targets = _inputs(6, 33, 4, torch.float32, "cpu")
    loss = linear_cross_entropy(hidden.view(2, 3, 4), weight, targets.view(2, 3), 4)
    loss.backward()
    wanted = _full_logits(hidden, weight, targets, 1, torch.float64)
    for ours, truth in zip([loss.detach(), hidden.grad, weight.grad], wanted, strict=True):
        assert _distance(ours, truth) < 1e-5


def test_chunks_are_few_where_their_sum_is_rounded():
    for tokens in (1, 1000, 8192, 100_000, 1_000_000):
        rows = chunk_rows(tokens, 128_256, torch.bfloat16, narrow_sum=True)
        assert -(-tokens // rows) <= module.NARROW_CHUNKS
        assert chunk_rows(tokens, 128_256, torch.bfloat16, narrow_sum=False) * 128_256 * 2 <= module.CHUNK_BYTES


def test_what_does_not_fit_together_is_refused():
    for change, said in (
        ({"chunk_tokens": 0}, "chunk_tokens is"),
        ({"chunk_tokens": 2.5}, "chunk_tokens is"),
        ({"weight": torch.zeros(0, 4)}, "V from 1"),
        ({"weight": torch.zeros(8, 3)}, "does not fit"),
        ({"targets": torch.zeros(3)}, "targets are"),
        ({"targets": torch.zeros(3, dtype=torch.long, device="meta")}, "on cpu and meta"),
        ({"hidden": torch.zeros(3, 4).int(), "weight": torch.zeros(8, 4).int()}, "int32 has no kernel"),
        ({"hidden": torch.zeros(3, 0), "weight": torch.zeros(8, 0)}, "at least one"),
    ):
        given = {"hidden": torch.ones(3, 4), "weight": torch.ones(8, 4), "targets": torch.zeros(3, dtype=torch.long)}
        with pytest.raises(FlopwiseError, match=said):
            linear_cross_entropy(**(given | change))
    with pytest.raises(FlopwiseError, match="at least one"):
        cross_entropy(torch.ones(3, 0), torch.full((3,), IGNORED))
    with pytest.raises(ValueError, match="one target for each row"):
        cross_entropy(torch.zeros(3, 8), torch.zeros(2, dtype=torch.long))
    with pytest.raises(module.Unsupported, match="without autocast"):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(8, 4).bfloat16(), torch.zeros(3, dtype=torch.long))


def test_of_float64_the_gradient_is_that_of_float64():
    hidden, weight, targets = _inputs(5, 9, 4, torch.float64, "cpu")
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets), logits)
    loss = linear_cross_entropy(hidden, weight, targets, 2)
    (loss * 3).backward()
    wanted = _full_logits(hidden, weight, targets, 3, torch.float64)
    assert loss.dtype == torch.float64
    for ours, truth in zip([loss.detach(), hidden.grad, weight.grad], wanted, strict=True):
        assert _distance(ours, truth) < 1e-14


def test_on_the_meta_device_it_has_a_shape():
    hidden, weight = (torch.empty(n, 4, device="meta", requires_grad=True) for n in (3, 8))
    loss = linear_cross_entropy(hidden, weight, torch.empty(3, dtype=torch.long, device="meta"))
    loss.backward()
    assert (loss.shape, hidden.grad.shape, weight.grad.shape) == ((), (3, 4), (8, 4))
