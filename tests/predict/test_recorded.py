"""A user's step under other recipes: what is derived from one recording is what another dry run records."""

import json
import math
from collections import Counter

import msgspec
import pytest

from flopwise.api.memory import memory
from flopwise.errors import Unsupported
from flopwise.predict.dry.run import dry_run
from flopwise.predict.fusion import compiled_ops, repeated_blocks
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict
from flopwise.predict.recorded.optimizer import recorded_form
from flopwise.predict.recorded.step import RecordedStep, recorded_step, to_record
from flopwise.spec.gpu import gpu
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import workload
from flopwise.work.operation import ATTENTION, LOSS, MATMUL, NORMALISATION, OPTIMIZER, SOFTMAX

STEPS = "py:recorded_steps:"
LLAMA, WRITTEN_OUT, GPT = STEPS + "llama", STEPS + "written_out_gpt", STEPS + "gpt"


@pytest.fixture(autouse=True, scope="module")
def _steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(__file__.rpartition("/")[0])
        yield


@pytest.fixture(scope="module")
def recorded(_steps):
    known: dict[str, RecordedStep] = {}

    def of(target):
        if target not in known:
            asked = workload(target)
            known[target] = recorded_step(to_record(asked), [dry_run(one) for one in to_record(asked)])
        return known[target]

    return of


def ops(step, **chosen):
    return [op for op in step.ops if all(getattr(op, name) == value for name, value in chosen.items())]


def kernels(some):
    return sum(op.kernels for op in some)


def moved(some):
    return sum(op.read_bytes + op.write_bytes for op in some)


def flops(step, kind=MATMUL):
    return sum(op.flops for op in step.ops if op.kind == kind)


def linear_flops(step):
    """Of products with weights; attention in fp32 may be products, too."""
    return sum(op.flops for op in ops(step, kind=MATMUL) if len(op.shapes[-1]) == 2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("target", "precision"), [(LLAMA, "bf16"), (LLAMA, "bf16-master"), (GPT, "bf16")])
def test_a_step_that_is_cast_is_the_dry_run_of_it(recorded, target, precision):
    own = {"optimizer": "flopwise"} if precision == "bf16-master" else {}
    asked = workload(target, precision=precision, **own)
    derived, run = recorded(target).under(asked), dry_run(asked)
    assert [op for op in derived.ops if op.phase != OPTIMIZER] == [op for op in run.ops if op.phase != OPTIMIZER]
    assert linear_flops(derived) == linear_flops(recorded(target).as_written)
    assert {op.dtype for op in ops(derived, kind=MATMUL)} == {"bf16"}


@pytest.mark.parametrize("target", [LLAMA, GPT])
def test_a_fused_optimizer_moves_what_a_dry_run_of_it_moves(recorded, target):
    """Weights, gradients and moments read once, three of the four written once; the same launches."""
    asked = workload(target, optimizer="fused")
    derived, run = (
        ops(step, phase=OPTIMIZER, kind=OPTIMIZER) for step in (recorded(target).under(asked), dry_run(asked))
    )
    assert kernels(derived) == kernels(run)
    assert moved(derived) == pytest.approx(moved(run), rel=0.01)
    elements = sum(weight.elements for weight in recorded(target).as_written.weights)
    assert moved(derived) == pytest.approx(7 * 4 * elements, rel=0.01)


def test_our_own_optimizer_moves_what_a_dry_run_of_it_moves(recorded):
    asked = workload(LLAMA, optimizer="flopwise")
    derived, run = (
        ops(step, phase=OPTIMIZER, kind=OPTIMIZER) for step in (recorded(LLAMA).under(asked), dry_run(asked))
    )
    assert kernels(derived) == kernels(run)
    assert moved(derived) == pytest.approx(moved(run), rel=0.01)


@pytest.mark.slow
def test_an_optimizer_that_code_fuses_on_a_gpu_alone_is_known_by_what_was_seen(recorded):
    """`fused=device.type == "cuda"` is a loop in a dry run."""
    step = recorded(STEPS + "fused_on_a_gpu")
    assert recorded_form(step.as_written.ops) == "adamw-loop"
    asked = workload(STEPS + "fused_on_a_gpu", optimizer="fused")
    seen = msgspec.structs.replace(asked.subject, written=Recipe(optimizer="fused"))
    derived = step.under(msgspec.structs.replace(asked, subject=seen))
    assert kernels(ops(derived, phase=OPTIMIZER)) == 2


def test_tf32_changes_what_fp32_matmuls_compute_in_and_nothing_else(recorded):
    step = recorded(GPT)
    changed = step.under(workload(GPT, precision="tf32"))
    differing = [(a, b) for a, b in zip(step.as_written.ops, changed.ops, strict=True) if a != b]
    assert {(a.kind, a.dtype, b.dtype) for a, b in differing} == {(MATMUL, "fp32", "tf32")}
    assert len(differing) == len(ops(step.as_written, kind=MATMUL))


def test_attention_that_is_written_out_becomes_the_fused_one_of_the_same_model(recorded):
    """Two models that differ in their attention alone: derived from the one is what is recorded of the other."""
    asked, other = workload(WRITTEN_OUT, attention="sdpa"), recorded(GPT).as_written
    written = msgspec.structs.replace(asked.subject, written=Recipe(attention="naive"))
    derived = recorded(WRITTEN_OUT).under(msgspec.structs.replace(asked, subject=written))
    assert not ops(derived, kind=SOFTMAX)
    for phase in ("forward", "backward"):
        fused, same = (ops(step, kind=ATTENTION, phase=phase) for step in (derived, other))
        assert [(op.op, op.flops, op.whole) for op in fused] == [(op.op, op.flops, op.whole) for op in same]
    assert flops(derived) == flops(other)


def test_a_backend_is_changed_in_half_precision_alone(recorded):
    names = {
        op.op
        for op in recorded(GPT).under(workload(GPT, precision="bf16", attention="sdpa-flash")).ops
        if op.kind == ATTENTION
    }
    assert names == {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}
    with pytest.raises(Unsupported, match="fp32"):
        recorded(GPT).under(workload(GPT, attention="sdpa-cudnn"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_loss_has_the_same_products_and_none_of_the_logits(recorded, precision):
    step = recorded(LLAMA)
    plain, fused = (step.under(workload(LLAMA, precision=precision, loss=loss)) for loss in ("full", "fused"))
    assert flops(fused) == flops(plain)
    assert not [op for op in fused.ops if "log_softmax" in op.op or "nll_loss" in op.op]
    known = {"share", "flopwise::cross_entropy_rows", "mean", "flopwise::scale_"}
    assert {op.op for op in ops(fused, kind=LOSS)} == known
    assert moved(ops(fused, phase="backward")) < moved(ops(plain, phase="backward"))


@pytest.mark.parametrize("lever", ["norm", "activation", "rope"])
def test_pieces_become_one_kernel_forward_and_one_backward_and_move_less(recorded, lever):
    step = recorded(LLAMA)
    joined = step.under(workload(LLAMA, **{lever: "triton"}))
    own = [op for op in joined.ops if op.op.startswith("flopwise::")]
    pieces = {"norm": 5, "activation": 2, "rope": 2}[lever]  # of two layers; with the last norm
    assert Counter(op.phase for op in own) == {"forward": pieces, "backward": pieces}
    assert moved(joined.ops) < moved(step.as_written.ops)
    assert kernels(joined.ops) < kernels(step.as_written.ops)
    assert flops(joined) == flops(step.as_written)


@pytest.mark.parametrize("lever", ["norm", "activation"])
def test_pieces_move_what_a_dry_run_of_the_kernels_moves(recorded, lever):
    """A past bug: a dry run found nothing to replace, as what tells a norm are its values."""
    asked = workload(LLAMA, **{lever: "triton"})
    derived, run = recorded(LLAMA).under(asked), dry_run(asked)
    assert kernels(run.ops) == kernels(derived.ops) < kernels(recorded(LLAMA).as_written.ops)
    assert moved(run.ops) == pytest.approx(moved(derived.ops), rel=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("levers", [{"rope": "triton"}, {"projections": "fused", "norm": "triton"}])
def test_what_no_dry_run_can_put_in_place_is_derived_from_the_rest(recorded, levers, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/")[0])
    asked = workload(LLAMA, **levers)
    found = predict(asked, Machine(gpu=gpu("h200")))
    assert kernels(found.step.ops) == kernels(recorded(LLAMA).under(asked).ops)
    assert any("memory is that of the step without" in note for note in found.step.notes)
    with pytest.raises(Unsupported, match="needs values, and a dry run has none"):
        memory(asked, predict=True)


@pytest.mark.parametrize("levers", [{"rope": "triton"}, {"projections": "fused"}])
def test_what_the_transformers_model_refuses_to_run_is_not_predicted(levers, tmp_path):
    """A past bug: it was derived as a user's step is."""
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = workload(f"hf:{tmp_path}", implementation="transformers", batch=1, context=16, **levers)
    with pytest.raises(Unsupported, match="works on flopwise's own model only"):
        predict(asked, Machine(gpu=gpu("h200")))


def test_a_norm_reads_and_writes_rows_once(recorded):
    rows = 2 * 32 * 64 * 4  # batch, context and width of the model, in fp32
    derived = recorded(LLAMA).under(workload(LLAMA, norm="triton"))
    forward, backward = (
        [op for op in ops(derived, kind=NORMALISATION, phase=phase) if op.module.endswith("input_layernorm")]
        for phase in ("forward", "backward")
    )
    for op in forward:
        assert op.write_bytes == rows
        assert rows < op.read_bytes < 1.02 * rows  # and the weight
    for op in backward:
        assert op.read_bytes == pytest.approx(2 * rows, rel=0.02)
        assert op.write_bytes == pytest.approx(rows, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_joined_projections_do_the_same_in_fewer_products(recorded, precision):
    step = recorded(LLAMA)
    plain, joined = (step.under(workload(LLAMA, precision=precision, projections=p)) for p in ("separate", "fused"))
    assert flops(joined) == flops(plain)
    for step_ops in (plain, joined):  # what a product's shapes say is what it does
        for op in ops(step_ops, kind=MATMUL):
            if len(op.shapes) >= 2 and len(op.shapes[-2]) == 2:
                assert op.flops == 2 * math.prod(op.shapes[-2]) * op.shapes[-1][1]
    # q, k and v are one, gate and up are one: three products less in each of two layers, three times over.
    assert len(ops(plain, kind=MATMUL)) - len(ops(joined, kind=MATMUL)) == 2 * 3 * 3


def test_recomputation_is_what_a_dry_run_of_it_shows(recorded):
    asked = workload(GPT, checkpoint=1)
    derived, run = recorded(GPT).under(asked), dry_run(asked)
    again, known = (sum(op.flops for op in step.ops if op.phase == "recompute") for step in (derived, run))
    assert again == known > 0
    assert flops(derived) + flops(derived, ATTENTION) == flops(run) + flops(run, ATTENTION)


def test_blocks_of_somebody_elses_model_are_compiled_each_by_itself(recorded):
    step = recorded(LLAMA).as_written
    compiled = compiled_ops(step.ops, "blocks", repeated_blocks(step.ops))
    outside = {op.module for op in compiled if op.op in ("pow", "rsqrt")}
    assert outside == {"model.norm"}  # of the norms, only the last is in no block
    assert any(op.op.startswith("fused ") and op.module.startswith("model.layers.1") for op in compiled)


@pytest.mark.parametrize(
    "levers",
    [{"norm": "triton"}, {"rope": "triton"}, {"loss": "fused"}, {"precision": "fp16"}, {"projections": "fused"}],
)
def test_a_lever_that_finds_nothing_to_change_is_refused(recorded, levers):
    target = STEPS + "perceptron"
    with pytest.raises(Unsupported):
        recorded(target).under(workload(target, **levers))


def test_a_shallower_step_is_linear_in_its_blocks(recorded):
    """So that the savings of deep models may be taken from shallow ones."""
    step = recorded(LLAMA)
    none, one, both = (step.with_blocks(n).as_written for n in (0, 1, 2))
    assert step.blocks == ["model.layers.0", "model.layers.1"]
    assert both == step.as_written
    assert flops(both) - flops(one) == flops(one) - flops(none) > 0
    elements = [sum(weight.elements for weight in each.weights) for each in (none, one, both)]
    assert elements[2] - elements[1] == elements[1] - elements[0] > 0


def test_what_was_recorded_is_predicted_at_once_through_the_one_door(recorded):
    asked = workload(LLAMA, precision="bf16", norm="triton")
    found = predict(asked, recorded=recorded(LLAMA))
    assert found.workload == asked
    assert found.ops == recorded(LLAMA).under(asked).ops
    assert found.compute_dtype == "bf16"


def test_a_loss_outside_of_the_model_is_not_compiled_with_it(recorded):
    inside, outside = (recorded(STEPS + name).as_written for name in ("gpt", "loss_outside"))
    for step, compiled in ((inside, True), (outside, False)):
        losses = [op for op in compiled_ops(step.ops, "default") if op.kind == LOSS]
        assert any(op.op.startswith("fused ") for op in losses) == compiled
        assert {op.phase for op in losses} >= {"loss", "backward"}
