"""Joined projections are the separate ones, one below the other: the same weights, loss and gradients."""

import pytest
import torch
from torch import Tensor

from flopwise.lm.loss import loss_full
from flopwise.lm.transformer import Transformer
from flopwise.predict.shapes.network import weight_shapes
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe

from .reference import GROUPED, QWEN3_LIKE, SPECS, batch

BIASED = QWEN3_LIKE.with_fields({"qkv_bias": True, "mlp_bias": True, "n_kv_heads": 2})
MODELS = SPECS | {"biased": BIASED}
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
LEVERS = [
    {}, {"attention": "naive", "norm": "eager", "activation": "eager"}, {"activation": "triton"}, {"checkpoint": 1},
    {"attention": "flash", "activation": "triton", "rope": "triton", "norm": "triton"},
]  # fmt: skip


def build(spec: ModelSpec, projections: str, **levers: object) -> Transformer:
    torch.manual_seed(7)
    return Transformer(spec, Recipe(projections=projections, **levers), 24)  # type: ignore[arg-type]


def joined(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Separate tensors by the names of the joined ones."""
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        module, _, kind = name.rpartition(".")
        outer, _, last = module.rpartition(".")
        whole = next((w for w, parts in PARTS.items() if last in parts and f"{outer}.{parts[0]}.{kind}" in named), "")
        place = f"{outer}.{whole}.{kind}" if whole else name
        found[place] = torch.cat((found[place], tensor)) if place in found else tensor
    return found


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_the_initial_weights_are_the_same_numbers_in_one_tensor(spec: ModelSpec) -> None:
    one, other = build(spec, "fused").state_dict(), joined(dict(build(spec, "separate").state_dict()))
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    names = ["blocks.0.attention.qkv.weight", *(["blocks.0.mlp.gate_up.weight"] if spec.mlp == "swiglu" else [])]
    assert set(names) <= set(one)


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_the_shape_simulator_has_the_same_weights(spec: ModelSpec) -> None:
    built = {name: tuple(p.shape) for name, p in build(spec, "fused").named_parameters()}
    assert weight_shapes(spec, "fused") == built
    assert sum(p.numel() for p in build(spec, "fused").parameters()) == spec.parameters()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("levers", LEVERS, ids=str)
@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_are_those_of_separate_projections(
    spec: ModelSpec, levers: dict[str, object], dtype: torch.dtype
) -> None:
    if spec.norm_kind == "layer":
        levers = {lever: value for lever, value in levers.items() if lever not in ("norm", "rope")}
    tokens, targets = batch(spec)
    told = []
    for projections in ("fused", "separate"):
        model = build(spec, projections, **levers).to(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # zero at the beginning, where they would hide a mistake
                    parameter.copy_(
                        torch.linspace(-1, 1, parameter.numel()) if "qkv" in name or "gate_up" in name else 0.1
                    )
            if projections == "separate":
                _same_biases(model)
        loss = loss_full(model(tokens), targets) if dtype == torch.float32 else model(tokens).square().mean()
        loss.backward()
        told.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (expected_loss, expected) = told
    tolerance = {"rtol": 2e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(loss, expected_loss, **tolerance)
    torch.testing.assert_close(gradients, joined(expected), **tolerance)


def _same_biases(model: Transformer) -> None:
    """What the joined bias holds, spread over the separate ones."""
    modules = dict(model.named_modules())
    for name in list(modules):
        for parts in PARTS.values():
            found = [modules.get(f"{name}.{part}") for part in parts]
            biases = [m.bias for m in found if m is not None and getattr(m, "bias", None) is not None]
            if len(biases) == len(parts):
                values = torch.linspace(-1, 1, sum(b.numel() for b in biases))
                for bias, part in zip(biases, values.split([b.numel() for b in biases]), strict=True):
                    bias.copy_(part)


def test_joined_projections_are_part_of_one_compiled_graph() -> None:
    model, same = build(GROUPED, "fused", compile="default"), build(GROUPED, "separate")
    tokens, _ = batch(GROUPED)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens)
    torch.testing.assert_close(compiled, same(tokens), atol=1e-5, rtol=1e-5)
