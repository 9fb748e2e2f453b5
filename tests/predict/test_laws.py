"""Laws that hold for every preset and lever: parts add up, formulas agree with the op list, more levers cost less."""

import msgspec
import pytest

from flopwise import roofline
from flopwise.errors import FlopwiseError
from flopwise.predict.account import account_for, by_module, total_row, uncounted
from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.fit import largest_batch, largest_context
from flopwise.predict.flops import model_flops
from flopwise.predict.machine import Machine, machine_with
from flopwise.predict.prediction import peak_bytes, predict
from flopwise.predict.rank_memory import of_one_rank
from flopwise.predict.shapes.network import weight_shapes
from flopwise.predict.shapes.step import account_step, sdpa_backend
from flopwise.spec.gpu import gpu
from flopwise.spec.model import preset, preset_names
from flopwise.spec.rank_share import rank_share
from flopwise.spec.recipe import CHOICES, FP8, WITH_MASTERS
from flopwise.spec.workload import workload
from flopwise.work.operation import (
    ACTIVATIONS,
    ATTENTION,
    CLASSES,
    GRADIENTS,
    LOGITS,
    MATMUL,
    OPTIMIZER_STATE,
    OWNERS,
    PARAMETERS,
    PHASES,
    SCORES,
)

OF_A_STEP = {lever: values for lever, values in CHOICES.items() if lever != "cache"}  # which generation alone has
LEVERS = [(lever, value) for lever, values in OF_A_STEP.items() for value in values] + [("checkpoint", 1)]
SMALL = {"n_layers": 3, "vocab": 1000}


@pytest.mark.parametrize("name", preset_names())
def test_the_weights_add_up_to_the_parameters(name):
    shapes = weight_shapes(preset(name)).values()
    assert sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes) == preset(name).parameters()


@pytest.mark.parametrize("name", ["tiny", "small", "gpt2", "llama3.2-1b"])
@pytest.mark.parametrize("phase", ["forward", "backward", "train"])
def test_the_ops_flops_are_the_formulas(name, phase):
    step = account_step(workload(name, phase=phase, attention="naive"))
    told = model_flops(preset(name), 4, 128 if name == "tiny" else 512, phase)
    assert step.flops() == told.total
    assert step.flops("forward") == told.forward


def test_operations_without_a_matmul_count_one_flop_an_element_in_account_and_roofline():
    asked = {"attention": "naive", "norm": "eager"}
    rows = account_for(workload("tiny", **asked), (Machine(gpu=gpu("h200")),)).rows
    points = [point for point in roofline("tiny", gpu="h200", **asked).points if point.kind != MATMUL]
    assert sum(point.flops * point.count for point in points) == total_row(rows).element_flops > 0
    assert {row.kind for row in rows if row.flops} == {MATMUL}


def test_fused_attention_computes_its_scores_once_more():
    step, told = account_step(workload("small")), model_flops(preset("small"), 4, 512)
    assert step.flops() - told.total == told.attention_forward // 2
    attention = [op.flops for op in step.ops if op.kind == ATTENTION and op.phase == "backward"]
    assert sum(attention) == told.attention_forward * 5 // 2


@pytest.mark.parametrize(("lever", "value"), LEVERS)
def test_every_lever_is_accounted_for_in_known_words(lever, value):
    shape = SMALL | ({"mlp": "gelu"} if value == "cuda" else {})
    beside = {"optimizer": "flopwise"} if value in WITH_MASTERS else {}  # which keeps masters
    beside |= {"ranks": 2} if lever == "parallel" and value != "off" else {}
    shape |= {"tied": False} if value == "pp" else {}
    asked = workload("small", set=shape, **{lever: value} | beside)
    step = of_one_rank(account_step(rank_share(asked)), asked)
    assert {op.kind for op in step.ops} <= set(CLASSES)
    assert {op.phase for op in step.ops} <= set(PHASES)
    assert {p.phase for p in step.phases} == {"forward", "loss", "backward", "optimizer"}
    for phase in step.phases:
        assert set(phase.owners) <= set(OWNERS)
        assert sum(phase.owners.values()) == phase.peak_bytes >= max(phase.start_bytes, phase.end_bytes)
    assert all(n >= 0 for phase in step.phases for n in phase.owners.values())
    assert step.phases[0].start_bytes == step.phases[-1].end_bytes  # a step leaves what it found


@pytest.mark.parametrize(("precision", "item"), [("fp32", 4), ("bf16", 4), ("fp16", 4), ("bf16-pure", 2)])
def test_weights_gradients_and_state_are_exact(precision, item):
    step, n = account_step(workload("gpt2", precision=precision)), preset("gpt2").parameters()
    after = step.after_backward.owners
    assert after[PARAMETERS] == after[GRADIENTS] == n * item
    assert after[OPTIMIZER_STATE] == 2 * n * item
    assert GRADIENTS not in step.start.owners
    # Autocast's half-precision copies of the weights are kept for the backward pass, and are no parameters.
    assert {phase.owners[PARAMETERS] for phase in step.phases} == {n * item}


def test_eight_bit_states_take_a_quarter_and_their_scales():
    full, eight = (account_step(workload("small"), optimizer_bits=bits).start.owners for bits in (32, 8))
    assert eight[OPTIMIZER_STATE] / full[OPTIMIZER_STATE] == pytest.approx((1 + 4 / 256) / 4, rel=0.001)
    with pytest.raises(FlopwiseError, match="optimizer_bits"):
        account_step(workload("small"), optimizer_bits=4)


def kept(**levers):
    return account_step(workload("small", phase="backward", context=1024, **levers)).after_forward.owners


def test_what_the_levers_are_for():
    assert kept(attention="naive")[SCORES] > 0
    assert SCORES not in kept(attention="sdpa")
    assert kept(checkpoint=1)[ACTIVATIONS] < kept()[ACTIVATIONS] / 4
    assert LOGITS not in kept(loss="chunked")
    assert kept(norm="torch")[ACTIVATIONS] < kept(norm="eager")[ACTIVATIONS]
    assert kept(activation="torch")[ACTIVATIONS] < kept(activation="eager")[ACTIVATIONS]
    assert kept(precision="bf16-pure")[ACTIVATIONS] < kept()[ACTIVATIONS]


def test_an_optimizer_step_in_one_kernel_list_needs_no_memory_and_foreach_a_copy_of_the_model():
    def extra(kind):
        phase = account_step(workload("small", optimizer=kind)).phases[-1]
        return phase.peak_bytes - phase.start_bytes

    weights = 4 * preset("small").parameters()
    assert extra("fused") == 0
    assert extra("foreach") == weights
    assert extra("adamw-loop") == 3 * 4 * preset("small").vocab * preset("small").d_model


def test_foreach_launches_are_what_a_trace_of_the_small_model_shows():
    """56 kernels in AdamW.step (tests/trace/fixtures/h200-small-fp32-naive-2steps)."""
    ops = account_step(workload("small", optimizer="foreach")).ops
    assert sum(op.kernels for op in ops if op.phase == "optimizer") == 56


def test_recomputing_costs_the_forward_pass_of_the_blocks_but_their_last_matmul():
    plain, again = (account_step(workload("small", attention="naive", checkpoint=c)) for c in (0, 1))
    assert again.flops("forward", "backward") == plain.flops("forward", "backward")
    head = 2 * 4 * 512 * 768 * 10_000
    last = 12 * 2 * 4 * 512 * 768 * 3072  # nothing after `down` keeps its result
    assert again.flops("recompute") == plain.flops("forward") - head - last


def test_the_rows_add_up_to_the_ops():
    step = account_step(workload("tiny"))
    whole = total_row(by_module(step.ops))
    assert whole.flops == step.flops()
    assert whole.moved_bytes == sum(op.read_bytes + op.write_bytes for op in step.ops)
    assert whole.kernels == sum(op.kernels for op in step.ops)


def test_what_is_kept_adds_up_to_its_owners():
    step = account_step(workload("small", attention="naive", precision="bf16"))
    owners = step.after_forward.owners
    assert sum(k.n_bytes for k in step.kept) == sum(owners[o] for o in (ACTIVATIONS, SCORES, LOGITS))


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": 3}, {"attention": "naive", "precision": "bf16"}, {"loss": "chunked"}, {"phase": "forward"}],
)
def test_two_shallow_models_tell_the_deep_ones_peak(options):
    w = workload("medium", **options)
    assert peak_bytes(w) == account_step(w).peak_bytes


def test_the_largest_batch_and_context_fit_and_the_next_do_not():
    w, h100 = workload("medium", precision="bf16"), gpu("h100")
    batch, context = largest_batch(w, h100.memory_bytes, h100), largest_context(w, h100.memory_bytes, h100)
    for changes, fits in (
        ({"batch": batch}, True), ({"batch": batch + 1}, False), ({"context": context}, True), ({"context": context + 64}, False),
    ):  # fmt: skip
        peak = account_step(msgspec.structs.replace(w, **changes), h100).peak_bytes
        assert (peak <= h100.memory_bytes) == fits, changes


def test_what_cannot_fit_has_no_batch():
    assert largest_batch(workload("llama3-70b", batch=1), gpu("h100").memory_bytes, gpu("h100")) == 0


def test_a_learned_table_ends_the_context():
    assert largest_context(workload("gpt2"), gpu("h200").memory_bytes, gpu("h200")) == 1024


@pytest.mark.parametrize("target", ["op:matmul", "py:my.step:make"])
def test_what_is_no_model_is_refused(target):
    with pytest.raises(FlopwiseError, match="no model"):
        account_step(workload(target))


def test_an_operation_whose_flops_nobody_counts_is_named():
    """A past silence: a step of an LSTM had 0 FLOPs, and a user took that for a fact."""
    from flopwise.work.operation import OpWork

    known = OpWork(op="mm", module="", phase="forward", kind="matmul", dtype="fp32", flops=8)
    lstm = OpWork(op="mkldnn_rnn_layer", module="", phase="forward", kind="other", dtype="fp32")
    assert uncounted([known]) == ""
    assert "mkldnn_rnn_layer" in uncounted([known, lstm])


@pytest.mark.parametrize(
    ("op", "kind"),
    [("_native_multi_head_attention", "attention"), ("new_mm", "matmul"), ("_transformer_encoder_layer_fwd", "other")],
)
def test_a_matmul_or_an_attention_without_flops_is_named(op, kind):
    """A past silence: the fast path of nn.TransformerEncoder had 0 FLOPs."""
    from flopwise.work.operation import OpWork

    work = OpWork(op=op, module="", phase="forward", kind=kind, dtype="fp32", shapes=((2, 3), (3, 4)))
    assert op in uncounted([work])
    view, empty = (
        msgspec.structs.replace(work, kernels=0),
        OpWork(op="mm", module="", phase="forward", kind="matmul", dtype="fp32", shapes=((0, 3), (3, 4))),
    )
    assert uncounted([view, empty]) == ""


@pytest.mark.parametrize(
    ("head_dim", "backend"), [(64, "cudnn"), (128, "cudnn"), (20, "flash"), (256, "flash"), (264, "efficient")]
)
def test_the_backend_of_half_precision_on_hopper_goes_by_the_head(head_dim, backend):
    assert sdpa_backend("sdpa", "bf16", gpu("h200"), head_dim) == backend


@pytest.mark.slow
def test_a_step_that_updates_within_its_backward_pass_has_a_lower_limit_and_no_more_memory():
    there = gpu("h200")
    for levers in ({"precision": "bf16", "optimizer": "fused"}, {"precision": "bf16", "compile": "blocks"}):
        plain, overlapped = (
            account_for(workload("large", overlap=overlap, **levers), (Machine(gpu=there),))
            for overlap in ("off", "on")
        )
        assert overlapped.gpus[0].limit.seconds < plain.gpus[0].limit.seconds
        assert overlapped.step.peak_bytes <= plain.step.peak_bytes
        assert overlapped.step.flops() == plain.step.flops()


def test_compiled_whole_it_has_not():
    levers = {"precision": "bf16", "compile": "default"}
    plain, overlapped = (
        account_for(workload("small", overlap=o, **levers), (Machine(gpu=gpu("h200")),)) for o in ("off", "on")
    )
    assert overlapped.gpus[0].limit == plain.gpus[0].limit


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", FP8)
def test_fp8_computes_a_layers_three_products_and_the_rest_is_bf16s(precision):
    own = {"optimizer": "flopwise", "batch": 16, "context": 1024}
    plain, narrow = (account_step(workload("small", precision=one, **own)) for one in ("bf16-master", precision))
    spec = preset("small")
    layers = spec.n_layers * (4 * spec.d_model**2 + 3 * spec.d_model * spec.d_ff)
    in_fp8 = sum(op.flops for op in narrow.ops if op.dtype == "fp8")
    assert in_fp8 == 3 * 2 * 16 * 1024 * layers
    assert narrow.flops() == plain.flops()
    assert narrow.start.owners == plain.start.owners
    machine = Machine(gpu=gpu("h200"), ceilings=from_datasheet(gpu("h200")))
    slow, fast = (account_for(workload("2.7B", precision=one, **own), (machine,)) for one in ("bf16-master", precision))
    assert fast.gpus[0].time.wall_ns < slow.gpus[0].time.wall_ns


def test_a_scale_for_every_row_saves_less_than_one_for_the_tensor():
    """As measured on an H200; a past bug: both were predicted alike."""
    h200 = machine_with(gpu("h200"))
    options = {"batch": 4, "context": 1024, "graph": "on", "norm": "triton", "activation": "triton"}
    steps = (workload("medium", precision=one, **options) for one in ("fp8", "fp8-rowwise", "bf16-master"))
    fp8, rowwise, bf16 = (predict(step, h200).time for step in steps)
    products = [time.gpu_ns_by_kind[MATMUL] for time in (fp8, rowwise, bf16)]
    assert 1.03 * products[0] < products[1] < 1.2 * products[0] < products[2]
    assert fp8.wall_ns < rowwise.wall_ns


def test_gate_and_up_in_one_fp8_layer_move_fewer_bytes_than_apart():
    own = {"optimizer": "flopwise", "precision": "fp8", "activation": "triton", "norm": "triton"}
    apart, joined = (account_step(workload("small", projections=one, **own)) for one in ("separate", "fused"))
    assert joined.flops() == apart.flops()
    mlp = [sum(op.read_bytes + op.write_bytes for op in one.ops if ".mlp" in op.module) for one in (apart, joined)]
    assert mlp[1] < mlp[0]
