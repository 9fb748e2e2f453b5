"""Norms of any class are recognised by what they compute, and no others."""

import pytest
import torch
from torch import Tensor, nn

from flopwise.patch import norms
from flopwise.patch.checked import disagreement
from flopwise.patch.patched import Patched
from patch.models import OwnGPT, assert_alike, check_patch, hugging_face


@pytest.mark.parametrize("value", ["torch", "triton"])
@pytest.mark.parametrize(("name", "count"), [("Llama", 5), ("Qwen3", 9), ("Mistral", 5), ("Gemma2", 9), ("Phi3", 5)])
def test_the_norms_of_transformers_models_are_replaced(name, count, value):
    patched = check_patch(hugging_face(name), lambda model, patched: norms.replace(model, value, patched))
    assert sum(int(line.split()[1]) for line in patched.done) == count
    assert patched.refused == []


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_norm_written_out_is_torchs(bias):
    patched = check_patch(OwnGPT(bias=bias), lambda model, patched: norms.replace(model, "torch", patched))
    assert patched.done == ["norm: 4 OwnLayerNorm run as one kernel"]


@pytest.mark.parametrize("name", ["GPT2", "ViT"])
def test_torchs_layer_norm_stays_as_it_is(name):
    patched = check_patch(hugging_face(name), lambda model, patched: norms.replace(model, "triton", patched))
    assert patched.done == []
    assert all("is one kernel as it is" in line for line in patched.refused)


class Variant(nn.Module):
    """Norms that look like RMSNorm or LayerNorm, and others that do not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.eps = how, 1e-6
        self.gain, self.shift = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.rand(16))
        if how != "affine":
            del self.shift

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "std":  # divides by the unbiased deviation
            return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)
        if self.how == "outside":  # eps outside of the root
            return self.gain * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        if self.how == "affine":
            x = x - x.mean(-1, keepdim=True)
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain + self.shift
        offset = {"one": 1.0, "plain": 0.0, "half": 0.5}[self.how]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (offset + self.gain)


@pytest.mark.parametrize(
    ("how", "known"), [("one", 1), ("plain", 1), ("affine", 1), ("half", 0), ("std", 0), ("outside", 0)]
)
def test_what_a_norm_computes_decides_not_its_name(how, known):
    model, patched = nn.Sequential(Variant(how)), Patched()
    assert norms.replace(model, "torch", patched) == known
    assert bool(patched.refused) != bool(known)
    x = torch.randn(3, 16, requires_grad=True)
    expected = Variant.forward(model[0], x)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad(model(x).sum(), x), torch.autograd.grad(expected.sum(), x), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("value", ["torch", "triton"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
def test_the_result_has_the_dtype_that_the_original_gives(x, weights, value):
    for name in ("Llama", "Gemma2"):
        norm = next(one for one in hugging_face(name).modules() if "RMSNorm" in type(one).__name__).to(weights)
        given, patched = torch.randn(4, 32, dtype=x), Patched()
        expected = norm(given)
        norms.replace(norm, value, patched)
        assert norm(given).dtype == expected.dtype
        torch.testing.assert_close(norm(given), expected, atol=0.02, rtol=0.02)
        assert patched.refused == []


def test_a_norm_that_behaves_otherwise_on_real_inputs_is_put_back():
    class Moody(nn.Module):
        """An RMSNorm up to a width that no probe has."""

        def __init__(self) -> None:
            super().__init__()
            self.eps, self.weight = 1e-6, nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            scale = 1.0 if x.shape[0] == len(norms.SCALES) else 2.0
            return scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    model, patched = nn.Sequential(Moody(), Moody()), Patched()
    assert norms.replace(model, "torch", patched) == 2
    x = torch.randn(4, 8)
    torch.testing.assert_close(model(x), Moody()(Moody()(x)))
    assert patched.done == []
    assert "differs from the original" in patched.refused[0]


def test_a_copy_of_a_patched_model_computes_with_its_own_weights():
    import copy

    model, patched = hugging_face("Llama"), Patched()
    norms.replace(model, "torch", patched)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    plain = hugging_face("Llama")
    plain.load_state_dict(twin.state_dict())
    assert_alike(twin, plain)


def test_a_compiled_model_keeps_the_replaced_norms():
    model, plain, patched = OwnGPT(), OwnGPT(), Patched()
    norms.replace(model, "torch", patched)
    assert_alike(model, plain)
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    tokens = torch.randint(0, 64, (2, 16))
    torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(tokens), plain(tokens))
    assert seen.count(torch.nn.functional.layer_norm) == 4


class TinyNorm(Variant):
    """Of any width."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__(how)
        for name in dict(self.named_parameters()):
            setattr(self, name, nn.Parameter(torch.ones(width)))


INPUTS = {
    "usual": torch.randn,
    "ones": torch.ones,
    "whole numbers": lambda *shape: torch.randint(-3, 4, shape).float(),
    "small": lambda *shape: 1e-3 * torch.randn(shape),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["plain", "one", "affine"])
@pytest.mark.parametrize("width", [3, 4, 8, 16])
def test_no_norm_is_refused_over_rounding_however_small_it_is(how, width):
    """One that is exact by luck has no error to compare with; one that gets its own input back has no gradient."""
    refused = []
    for inputs in INPUTS.values():
        for rows in (1, 2, 4):
            for seed in (0, 1, 42):
                model, patched = nn.Sequential(TinyNorm(how, width)), Patched()
                norms.replace(model, "torch", patched)
                torch.manual_seed(seed)
                model(inputs(rows, width).requires_grad_())
                refused += patched.refused
    assert refused == []


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize(
    "fault",
    [
        lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, 2e-6),  # another eps
        lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w + 1, 1e-6),
        lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:], w, None, 1e-6),
        lambda x, w: torch.nn.functional.rms_norm(x.bfloat16(), x.shape[-1:], w.bfloat16(), 1e-6).float(),
        lambda x, w: torch.nn.functional.rms_norm(x.detach(), x.shape[-1:], w, 1e-6) + 0 * x,
    ],
    ids=["eps", "offset", "mean", "half precision", "no gradient"],
)
def test_faults_are_not_taken_for_rounding(fault, width):
    torch.manual_seed(0)
    x, weight = 0.1 * torch.randn(4, width), torch.rand(width) + 0.5

    def written(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    tensors = [x.requires_grad_(), weight.requires_grad_()]
    assert disagreement(written, fault, tensors, written) is not None
