"""Attention, its parts, and the small operations around it."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.errors import Unsupported
from flopwise.lm import layers
from flopwise.lm.attention import attention_function, sdpa_backend_name

KINDS = ("naive", "sdpa", "sdpa-flash", "flex")


class Kernels(TorchDispatchMode):
    """Every operation that writes a result of its own, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def qkv(heads: int = 4, kv_heads: int = 2, context: int = 21, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, context, dim, generator=generator) for h in (heads, kv_heads, kv_heads))  # type: ignore[return-value]


def by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """One query at a time over what it may see, in float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = (x[b, h * k.shape[1] // q.shape[1]].double() for x in (k, v))
            for t in range(q.shape[2]):
                seen = t + 1 if causal else q.shape[2]
                weights = torch.exp(keys[:seen] @ q[b, h, t].double() / math.sqrt(q.shape[3]))
                out[b, h, t] = weights @ values[:seen] / weights.sum()
    return out


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("context", [21, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 130))])
@pytest.mark.parametrize("causal", [True, False])
def test_every_kind_is_attention(kind: str, heads: int, kv_heads: int, context: int, causal: bool) -> None:
    q, k, v = qkv(heads, kv_heads, context)
    attend = attention_function(kind, compiled_elsewhere=False, causal=causal)
    torch.testing.assert_close(attend(q, k, v).double(), by_hand(q, k, v, causal), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
def test_without_heads_is_with_one(kind: str) -> None:
    q, k, v = qkv(1, 1)
    attend = attention_function(kind, compiled_elsewhere=False)
    flat = attend(q[:, 0], k[:, 0], v[:, 0])
    assert flat.shape == (2, 21, 16)
    torch.testing.assert_close(flat.double(), by_hand(q, k, v)[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["naive", "sdpa", "sdpa-flash"])
def test_grouped_heads_equal_repeated_ones_in_value_and_gradient(kind: str) -> None:
    attend = attention_function(kind, compiled_elsewhere=False)
    q, k, v = (x.requires_grad_() for x in qkv())
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    grouped = attend(q, k, v)
    gradients = torch.autograd.grad(grouped, (q, k, v), upstream)
    wide_k, wide_v = (x[:, [0, 0, 1, 1]] for x in (k, v))
    repeated = attend(q, wide_k, wide_v)
    torch.testing.assert_close(grouped, repeated)
    torch.testing.assert_close(gradients, torch.autograd.grad(repeated, (q, k, v), upstream))


def test_naive_writes_every_score_and_sdpa_writes_none() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple | list) else (out,)
            self.numel = max(self.numel, *(x.numel() for x in tensors if isinstance(x, Tensor)), 0)
            return out

    q, k, v = qkv(context=200)
    for kind, scores in (("naive", True), ("sdpa", False)):
        with Largest() as largest:
            attention_function(kind, compiled_elsewhere=False)(q, k, v)
        assert (largest.numel >= 2 * 4 * 200 * 200) is scores


def test_naive_attention_names_its_parts_in_a_profile() -> None:
    q, k, v = qkv()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention_function("naive", compiled_elsewhere=False)(q, k, v)
    names = {event.key for event in profile.key_averages()}
    assert {"attn_scores", "attn_softmax", "attn_values"} <= names


def test_a_backend_that_cannot_run_here_says_so() -> None:
    with pytest.raises(Unsupported, match=r"sdpa-cudnn.*cpu"):
        attention_function("sdpa-cudnn", compiled_elsewhere=False)(*qkv())


def test_a_pinned_backend_leaves_the_process_as_it_was() -> None:
    before = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    attention_function("sdpa-flash", compiled_elsewhere=False)(*qkv())
    with pytest.raises(Unsupported):
        attention_function("sdpa-cudnn", compiled_elsewhere=False)(*qkv())
    assert before == (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())


def test_sdpa_backend_name_is_what_the_kernel_is_called() -> None:
    q, k, v = qkv()
    with Kernels() as kernels:
        attention_function("sdpa", compiled_elsewhere=False)(q, k, v)
    assert sdpa_backend_name(q, k, v) == "flash"
    assert any("flash_attention" in name for name in kernels.names)
    assert sdpa_backend_name(q[:, 0], k[:, 0], v[:, 0]) == "flash"
    assert sdpa_backend_name(q.long(), k, v[0, 0]) in ("math", "unknown")  # nonsense is answered, not raised


def test_rope_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(16, generator=generator).expand(1, 1, 40, 16) for _ in range(2))
    cos, sin = layers.rope_angles(40, 16, 10_000.0, torch.device("cpu"))
    scores = (layers.rope(q, cos, sin) @ layers.rope(k, cos, sin).mT)[0, 0]  # [T, T]
    for distance in range(-39, 40):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
    assert scores[0].std() > 0.1  # and do depend on it
    torch.testing.assert_close(layers.rope(q, cos, sin).norm(dim=-1), q.norm(dim=-1))


def test_rope_angles_are_fp32_whatever_surrounds_them() -> None:
    exact = torch.arange(3000, dtype=torch.float64)[:, None] * 10_000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = layers.rope_angles(3000, 16, 10_000.0, torch.device("cpu"))
    torch.testing.assert_close(cos.double(), exact.cos(), atol=5e-4, rtol=0)
    torch.testing.assert_close(sin.double(), exact.sin(), atol=5e-4, rtol=0)


SMALL_OPERATIONS = [
    (layers.GELU, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 8),
    (layers.SILU, lambda x: x / (1 + torch.exp(-x)), 2),
    (layers.SOFTMAX, lambda x: torch.softmax(x, -1), 5),
]


@pytest.mark.parametrize(("forms", "formula", "kernels"), SMALL_OPERATIONS, ids=["gelu", "silu", "softmax"])
def test_small_operations_equal_their_formula_in_as_many_kernels(forms, formula, kernels) -> None:  # type: ignore[no-untyped-def]
    x = 4 * torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    exact = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(formula(exact), exact, upstream.double())
    for form in ("eager", "torch"):
        y = x.clone().requires_grad_()
        out = forms[form](y)
        torch.testing.assert_close(out.double(), formula(exact), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(torch.autograd.grad(out, y, upstream)[0].double(), gradient, atol=1e-5, rtol=1e-5)
        with Kernels() as counted:
            forms[form](x)
        assert len(counted.names) == (kernels if form == "eager" else 1), counted.names


def test_softmax_eager_is_safe_for_large_numbers() -> None:
    x = torch.tensor([1e4, 1e4 - 1, float("-inf")])
    torch.testing.assert_close(layers.softmax_eager(x), torch.softmax(x, -1))


def test_rotary_angles_are_kept_in_fp32_and_go_on_past_the_table() -> None:
    table = layers.RopeTable(8, 16, 10_000.0).to(torch.bfloat16)
    long = layers.rope_angles(20, 16, 10_000.0, torch.device("cpu"))
    for context in (1, 8, 20):
        for kept, exact in zip(table(context, torch.device("cpu")), long, strict=True):
            assert kept.dtype == torch.float32
            assert torch.equal(kept, exact[:context])
    assert table.state_dict() == {}
