"""The law of the levers: each changes how a step runs, none what it computes."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.lm.loss import hidden_loss, loss_full
from flopwise.lm.precision import autocast, weights_dtype
from flopwise.lm.transformer import Transformer
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe

from .pairwise import all_pairs, pairs_of, pairwise_cases
from .reference import GPT2_LIKE, GROUPED, QWEN3_LIKE, SPECS, TINY, batch, reference_logits, reference_loss, shake

# Largest relative error of the loss, and of a parameter's gradient. Set from what plain PyTorch in that precision (the
# default recipe) does on these models over four seeds: gradients are off by up to 1.4e-6 in fp32, 3.8e-3 in fp16 and
# 3.2e-2 in bf16, which has three bits fewer; the limits leave half as much again, so that a lever that is worse than
# its precision fails.
TOLERANCE = {
    "fp32": (1e-6, 5e-6),
    "tf32": (1e-6, 5e-6),  # the CPU has no TF32
    "fp16": (1e-4, 1e-2),  # CPUs differ in how they round its sums: 7e-3 on one
    "bf16": (1e-3, 5e-2),
    "bf16-pure": (1e-3, 5e-2),
}
OWN = {"attention": "flash", "norm": "triton", "activation": "triton", "rope": "triton", "loss": "fused"}
NAIVE = {"attention": "naive", "norm": "eager", "activation": "eager"}


def step_of(model: Transformer, tokens: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    of_hidden: Any = None if model.recipe.loss == "full" else hidden_loss(model.recipe.loss)

    def step() -> Tensor:
        with autocast(model.recipe, "cpu"):
            if of_hidden is None:
                return loss_full(model(tokens), targets)
            loss: Tensor = of_hidden(model.hidden(tokens), model.head_weight, targets, chunk_tokens=20)
            return loss

    return step


def step_loss(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    return step_of(model, tokens, targets)()


def build(spec: ModelSpec, recipe: Recipe) -> Transformer:
    return shake(Transformer(spec, recipe)).to(weights_dtype(recipe))


def check_against_reference(model: Transformer, loss: Tensor, tokens: Tensor, targets: Tensor) -> None:
    """Loss and every gradient against the float64 reference at the same (rounded) weights."""
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_loss(model.spec, weights, tokens, targets)
    gradients = torch.autograd.grad(expected, list(weights.values()))
    loss_tolerance, gradient_tolerance = TOLERANCE[model.recipe.precision]
    assert abs(loss.item() - expected.item()) < loss_tolerance * expected.item()
    # A key's bias shifts all scores of a query alike: without rotary positions its gradient is zero, and its error
    # is only small beside the others' size.
    smallest = 0.01 * max(g.norm() for g in gradients)
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None, name
        error = (parameter.grad.double() - gradient).norm() / max(gradient.norm(), smallest)
        assert error < gradient_tolerance, f"{name}: {error:.1e}"


LEVERS: dict[str, tuple[Any, ...]] = {
    "spec": tuple(SPECS),
    "precision": tuple(TOLERANCE),
    "attention": ("naive", "sdpa", "sdpa-flash", "flash"),
    "norm": ("eager", "torch", "triton"),
    "activation": ("eager", "torch", "triton"),
    "rope": ("eager", "triton"),
    "loss": ("full", "chunked", "fused"),
    "checkpoint": (0, 1, 2, 100),
}


def fits(case: dict[str, Any]) -> bool:
    """Whether the model has what the kernels are for."""
    spec = SPECS.get(case.get("spec", ""))
    if spec is None:
        return True
    no_norm = spec.norm_kind == "layer" and case.get("norm") == "triton"
    return not no_norm and not (spec.positions != "rope" and case.get("rope") == "triton")


CASES = pairwise_cases(LEVERS, fits)


def test_every_two_levers_meet_in_a_case() -> None:
    met = set().union(*map(pairs_of, CASES))
    assert all_pairs(LEVERS, fits) <= met
    assert len(CASES) < 40


def test_a_kernel_for_something_else_is_refused_in_one_line() -> None:
    with pytest.raises(Unsupported, match="LayerNorm"):
        build(GPT2_LIKE, Recipe(norm="triton"))
    with pytest.raises(Unsupported, match="SwiGLU"):
        build(TINY, Recipe(activation="cuda"))
    model = build(GPT2_LIKE, Recipe(activation="cuda"))
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="GPU"):
            model(batch(GPT2_LIKE)[0])


def test_without_triton_its_levers_are_refused_and_the_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("flopwise.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    build(TINY, Recipe())
    for lever, value in OWN.items():
        with pytest.raises(Unsupported, match=f"{lever} = '{value}' needs Triton"):
            step_loss(build(TINY, Recipe(**{lever: value})), *batch(TINY))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_every_lever_gives_the_reference_loss_and_gradients(case: dict[str, Any]) -> None:
    spec = SPECS[case["spec"]]
    model = build(spec, Recipe(**{lever: value for lever, value in case.items() if lever != "spec"}))
    tokens, targets = batch(spec)
    loss = step_loss(model, tokens, targets)
    if model.recipe.precision == "fp16":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters()))
    else:
        loss.backward()
    check_against_reference(model, loss, tokens, targets)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_flex_runs_forward_on_the_cpu_and_says_why_it_cannot_train_there(spec: ModelSpec) -> None:
    model = build(spec, Recipe(attention="flex"))
    tokens, _ = batch(spec)
    expected = torch.stack(
        [reference_logits(spec, {n: p.double() for n, p in model.named_parameters()}, row) for row in tokens]
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs unfused without a compiler
        torch.testing.assert_close(model(tokens).double(), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(Unsupported, match="flex"):
        model(tokens)


ONE = {"n_layers": 1}  # every block is as much work for the compiler
COMPILED = [
    (TINY, {"attention": "sdpa-flash", "loss": "chunked", "precision": "bf16", "checkpoint": 1}),
    pytest.param(GPT2_LIKE, NAIVE, marks=pytest.mark.slow),
    (QWEN3_LIKE.with_fields(ONE), {**OWN, "precision": "bf16"}),
]


@pytest.mark.parametrize(("spec", "levers"), COMPILED, ids=lambda x: x.name if isinstance(x, ModelSpec) else "")
@pytest.mark.slow
def test_the_step_is_one_graph_to_the_compiler_and_computes_the_same(
    spec: ModelSpec, levers: dict[str, object]
) -> None:
    model = build(spec, Recipe(compile="default", **levers))
    tokens, targets = batch(spec)
    torch.compiler.reset()
    # aot_eager is the compiler up to code generation: the capture, the joint graph, the partition.
    step = torch.compile(step_of(model, tokens, targets), fullgraph=True, backend="aot_eager")
    loss = step()
    loss.backward()
    check_against_reference(model, loss, tokens, targets)


@pytest.mark.slow
def test_compiled_code_computes_the_same() -> None:
    spec = TINY.with_fields(ONE)
    model = build(spec, Recipe(compile="default"))
    tokens, targets = batch(spec)
    torch.compiler.reset()
    loss = torch.compile(step_of(model, tokens, targets), fullgraph=True)()
    loss.backward()
    check_against_reference(model, loss, tokens, targets)


@pytest.mark.slow
def test_flex_attention_is_part_of_the_compiled_graph() -> None:
    spec = GROUPED.with_fields(ONE)
    model, same = build(spec, Recipe(attention="flex", compile="default")), build(spec, Recipe())
    tokens, _ = batch(spec)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens)
        torch.testing.assert_close(compiled, same(tokens), atol=1e-5, rtol=1e-5)


def test_checkpointing_keeps_fewer_tensors_and_runs_the_blocks_again() -> None:
    spec = TINY.with_fields({"n_layers": 4})
    tokens, targets = batch(spec)

    def saved_and_runs(every: int) -> tuple[int, int]:
        model = build(spec, Recipe(checkpoint=every))
        saved, runs = 0, 0

        def pack(x: Tensor) -> Tensor:
            nonlocal saved
            saved += x.numel()
            return x

        def count(*_: object) -> None:
            nonlocal runs
            runs += 1

        for block in model.blocks:
            block.register_forward_pre_hook(count)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = step_loss(model, tokens, targets)
        kept = saved
        loss.backward()
        return kept, runs

    everything, once = saved_and_runs(0)
    each, twice = saved_and_runs(1)
    assert once == 4
    assert twice == 8
    assert each < everything / 3
    model = build(spec, Recipe(checkpoint=1))
    with torch.no_grad():  # nothing is kept, so nothing is checkpointed
        assert not step_loss(model, tokens, targets).requires_grad


def test_a_context_the_model_does_not_have_is_refused_before_it_runs() -> None:
    for spec in (GPT2_LIKE, TINY.with_fields({"window": 16})):
        model = Transformer(spec, Recipe())
        limit = spec.window or spec.max_context
        model(torch.zeros(1, limit, dtype=torch.long))
        with pytest.raises(FlopwiseError, match=f"context = {limit + 1}"):
            model(torch.zeros(1, limit + 1, dtype=torch.long))
