"""A dry run tells what a GPU would have measured, and its parts sum to the whole."""

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flopwise.capture.build import build_step
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.predict.dry import run as module
from flopwise.predict.dry.run import dry_run
from flopwise.spec.workload import workload
from flopwise.work.operation import CLASSES, OWNERS, PHASES

LAYERS = {"n_layers": 7}  # the fewest that are not all run


def tiny(**options):
    """A model of one block."""
    fields = {"n_layers": 1} | options.pop("set", {})
    return workload("tiny", set=fields, **({"context": 32} | options))


@pytest.fixture(scope="module")
def trained():
    return dry_run(tiny(precision="bf16", attention="naive", set={"n_layers": 2}))


def phases(run):
    return [(m.start_bytes, m.peak_bytes, m.end_bytes) for m in run.phases]


# What an H200 measured: benchmarks/results/h200-2026-11, torch 2.11, to the byte.


def test_attention_takes_what_the_h200_measured():
    run = dry_run(workload("op:attention", context=256, attention="naive", set={"dim": 16}))
    flush = 4 * 62_914_560  # the benchmark's own buffer, four times the L2 cache
    measured = [(319_684_608, 325_804_032, 323_706_880), (323_706_880, 332_226_560, 319_684_608)]
    assert phases(run) == [tuple(value - flush for value in phase) for phase in measured]
    assert run.phases[-1].reserved_bytes == 341_835_776 - flush


def test_a_forward_pass_takes_what_the_h200_measured():
    run = dry_run(workload("small", phase="forward", attention="naive", norm="eager", activation="eager"))
    assert phases(run) == [(631_614_464, 738_798_592, 631_614_464)]
    assert run.phases[0].reserved_bytes == 950_009_856


@pytest.mark.slow
def test_mixed_precision_training_is_within_a_thousandth_of_the_h200():
    run = dry_run(workload("small", precision="bf16", optimizer="fused"))
    assert run.attention == ("cudnn",)
    assert run.peak_bytes == pytest.approx(3_289_159_168, rel=1e-3)


# Laws.


def test_owners_sum_to_what_is_allocated_at_every_op(trained):
    assert set(trained.live) <= set(OWNERS)
    assert {len(values) for values in trained.live.values()} == {len(trained.ops)}
    totals = [sum(values) for values in zip(*trained.live.values(), strict=True)]
    assert max(totals) == trained.peak_bytes == totals[trained.peak_op]
    assert max(m.peak_bytes for m in trained.phases) == trained.peak_bytes
    assert sum(t.bytes for t in trained.largest) <= trained.peak_bytes  # the twenty largest of what was there
    assert trained.moments[-1].total_bytes == trained.phases[-1].end_bytes


def test_moments_follow_the_phases(trained):
    moments = {m.moment: m.owners for m in trained.moments}
    assert list(moments) == ["start of forward", "after forward", "after backward", "after optimizer"]
    assert "gradients" not in moments["after forward"]
    assert "activations" not in moments["after backward"]
    assert moments["after backward"]["gradients"] >= trained.gradients_bytes
    assert moments["start of forward"] == moments["after optimizer"]


def test_parameters_gradients_and_state_are_exact(trained):
    n = tiny(set={"n_layers": 2}).subject.parameters()
    assert (trained.parameters_bytes, trained.gradients_bytes, trained.optimizer_bytes) == (4 * n, 4 * n, 8 * n)


def test_bf16_weights_take_half_and_a_fused_optimizer_counts_its_steps_on_the_gpu():
    run = dry_run(tiny(precision="bf16-pure", optimizer="fused"))
    n, tensors = tiny().subject.parameters(), 9 + 3
    assert (run.parameters_bytes, run.gradients_bytes) == (2 * n, 2 * n)
    assert run.optimizer_bytes == 4 * n + 4 * tensors


def test_every_op_has_a_phase_a_class_and_a_module_that_exists(trained):
    assert {op.phase for op in trained.ops} == {"forward", "loss", "backward", "optimizer"}
    assert all(op.phase in PHASES and op.kind in CLASSES for op in trained.ops)
    for phase in ("forward", "backward"):
        matmuls = [op for op in trained.ops if op.kind == "matmul" and op.phase == phase]
        assert {op.module for op in matmuls} >= {
            "head",
            "blocks.0.attention.q",
            "blocks.1.mlp.down",
            "blocks.0.attention",
        }
        assert {op.dtype for op in matmuls} == {"bf16"}


def test_naive_attentions_scores_are_found_by_name(trained):
    scores = [t for t in trained.largest if t.owner == "attention scores"]
    assert scores
    assert all(t.shape[-2:] == (32, 32) and ".attention" in t.module for t in scores)
    built = [t for t in trained.largest if t.owner == "parameters"]
    assert built
    assert all(not t.op and not t.phase for t in built)


def test_recomputed_ops_are_told_apart_and_the_blocks_keep_less():
    kept, recomputed = (dry_run(tiny(phase="backward", checkpoint=every)) for every in (0, 1))
    again = [op.op for op in recomputed.ops if op.phase == "recompute" and op.kernels]
    once = [op.op for op in recomputed.ops if op.phase == "forward" and op.module.startswith("blocks") and op.kernels]
    assert again == once[: len(again)]  # it stops when all that backward needs is there
    assert len(again) > len(once) / 2
    saved = [run.moments[1].owners["activations"] for run in (kept, recomputed)]
    assert saved[1] < saved[0] / 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {"set": LAYERS | {"n_kv_heads": 2, "norm_kind": "layer", "tied": True}, "precision": "bf16", "loss": "chunked"},
        {"set": LAYERS, "precision": "bf16-master"},  # whose optimizer keeps something from the beginning
        pytest.param(
            {
                "set": {"n_layers": 13, "mlp": "gelu", "positions": "learned", "max_context": 16},
                "checkpoint": 2,
                "phase": "backward",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_deep_model_from_copies_equals_the_deep_model(monkeypatch, options):
    deep = tiny(context=16, batch=1, **options)
    copied = dry_run(deep)
    monkeypatch.setattr(module, "extend", None)  # would be called
    monkeypatch.setattr(module, "shallow_depth", lambda layers, checkpoint: None)
    assert copied == dry_run(deep)


# FLOPs.


def test_flops_equal_torchs_counter_on_a_real_step():
    work = tiny(attention="naive", set={"mlp": "gelu", "qkv_bias": True}, checkpoint=1, phase="backward")
    step = build_step(work, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        for run in step.phases.values():
            run()
    assert sum(op.flops for op in dry_run(work).ops) == counter.get_total_flops()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_fused_attention_counts_the_flops_that_the_cpu_leaves_out(kv_heads):
    run = dry_run(tiny(precision="bf16", set={"n_kv_heads": kv_heads}, phase="backward"))
    forward = 2 * 2 * 4 * 4 * 32 * 32 * 16  # two matmuls: batch, heads, T, T, head_dim
    attention = [op for op in run.ops if op.kind == "attention"]
    assert [op.flops for op in attention if op.phase == "forward"] == [forward]
    assert [2 * op.flops for op in attention if op.phase == "backward"] == [5 * forward]


def test_tf32_is_what_the_matmuls_compute_in():
    run = dry_run(tiny(precision="tf32", phase="forward"))
    assert {op.dtype for op in run.ops if op.kind == "matmul"} == {"tf32"}


# Any workload.


def test_a_compiled_step_is_told_as_its_eager_ops():
    run = dry_run(tiny(compile="default", graph="on", attention="flex"))
    assert len(run.notes) == 3
    assert run.attention == ("flash",)


def test_the_users_own_step(monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    run = dry_run(workload("py:steps:trains"))
    assert [m.moment for m in run.moments] == ["start of forward", "after forward", "after backward", "after optimizer"]
    assert run.parameters_bytes == run.gradients_bytes == run.optimizer_bytes // 2 == 4 * (8 * 32 + 32 + 32 * 5 + 5)
    assert {"0", "3"} <= {op.module for op in run.ops if op.kind == "matmul" and op.phase == "backward"}
    assert "native_dropout" in {op.op for op in run.ops}  # one kernel, as on the GPU


@pytest.mark.parametrize(("gpu", "narrow"), [("hopper", ""), ("hopper", "narrow_"), ("cpu", "")])
def test_inference_mode_counts_as_no_grad_does(monkeypatch, gpu, narrow):
    """A past silence: in inference mode linears and attention come whole, and had no FLOPs."""
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    steps = (f"py:steps:{narrow}{step}" for step in ("under_no_grad", "in_inference_mode"))
    plain, inference = (dry_run(workload(step), gpu) for step in steps)
    assert inference.ops == plain.ops
    assert (inference.live, inference.memory()) == (plain.live, plain.memory())
    linears = 2 * 2 * 16 * 5 * 64 * 64
    assert sum(op.flops for op in inference.ops) == linears + 2 * 2 * 2 * 16 * 16 * 64


@pytest.mark.parametrize("step", ["copied_layers", "copied_model"])
def test_deep_copied_modules_keep_their_parameters_and_names(monkeypatch, step):
    """A past bug: in a copy nothing is registered, and its weights were taken for inputs."""
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    run = dry_run(workload(f"py:steps:{step}"))
    assert run.parameters_bytes == 4 * 2 * (8 * 8 + 8)
    assert {"0.0", "1.0"} <= {op.module for op in run.ops if op.kind == "matmul"}


@pytest.mark.slow
def test_the_transformers_librarys_own_model(tmp_path):
    pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64} | shape
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    work = workload(
        f"hf:{tmp_path}/config.json", implementation="transformers", precision="bf16", context=32, phase="backward"
    )
    run = dry_run(work)
    assert run.parameters_bytes == 4 * work.subject.parameters()
    assert "inner.model.layers.0.mlp.up_proj" in {op.module for op in run.ops if op.phase == "backward"}


@pytest.mark.parametrize(
    ("step", "said", "hint"),
    [
        ("counts_by_values", "nonzero", ".item()"),
        ("wants_cuda", "'cuda:0'", "device that the factory is given"),
        ("raises", "ValueError: no luck", "bench"),
        ("wrong_return", "returned", "factory"),
    ],
)
def test_what_cannot_be_dry_run_is_said_in_one_line(monkeypatch, step, said, hint):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    with pytest.raises(FlopwiseError, match=said) as refused:
        dry_run(workload(f"py:steps:{step}"))
    assert "\n" not in refused.value.message
    assert hint in refused.value.hint


def test_a_number_that_is_read_is_taken_as_one_and_said(monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    assert dry_run(workload("py:steps:reads_a_number")).notes == (module.GUESSED,)


def test_positions_have_values_so_that_transformers_makes_no_masks(monkeypatch):
    """A past bug: told that its tensors are traced, it masks packed sequences, and SDPA then has a mask and copied keys."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    run = dry_run(workload("py:steps:transformers_llama", precision="bf16"))
    attention = [op for op in run.ops if op.kind == "attention" and op.phase == "forward"]
    assert [len(op.shapes) for op in attention] == [3, 3]  # query, key and value
    assert [op.shapes[1][1] for op in attention] == [2, 2]  # heads of the keys
    assert {op.module for op in attention} == {f"model.layers.{n}.self_attn" for n in range(2)}
    assert not run.notes


def test_optimizers_that_do_not_say_how_go_over_lists_as_on_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    gpu, cpu = (dry_run(workload("py:steps:transformers_llama"), kind) for kind in ("hopper", "cpu"))
    updates = [{op.op for op in run.ops if op.phase == "optimizer" and op.kernels} for run in (gpu, cpu)]
    assert all(name.startswith("_foreach") for name in updates[0])
    assert not any(name.startswith("_foreach") for name in updates[1])


def test_a_pinned_backend_that_cannot_is_refused_as_on_the_gpu():
    with pytest.raises(Unsupported, match="held to flash"):
        dry_run(tiny(attention="sdpa-flash"))


def test_an_unknown_architecture_is_refused():
    with pytest.raises(FlopwiseError, match="hoper"):
        dry_run(tiny(), gpu="hoper")


def test_nothing_stays_changed_behind_a_dry_run(trained):
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.exp(x @ x).dtype == torch.bfloat16  # the CPU's own policy is back
    assert "FusedRms" not in str(torch.nn.functional.rms_norm(x, (4,)).grad_fn)
    assert not torch.nn.Linear(2, 2).to(torch.bfloat16).weight.is_meta
