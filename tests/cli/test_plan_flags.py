"""`flopwise plan … --flags`: lines that can be copied, and that the programs take."""

import json
import re
import shlex

import msgspec
import pytest

import flopwise
from flopwise.render.megatron_flags import pipeline_layout
from flopwise.render.plan_flags import flag_lines
from flopwise.spec.software import PROGRAMS

SMALL = ("plan", "llama3-8b", "--gpu", "h100", "--gpus", "64", "--tp", "4")
NAMED = {
    "torchrun": "torchrun --nnodes 8 --nproc-per-node 8",
    "torchtitan": "--parallelism.tensor_parallel_degree 4",
    "megatron": "--tensor-model-parallel-size 4",
    "accelerate": "tp_size=4",
}
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


def lines(program, model, gpu="h100", **given):
    found = flopwise.plan(model, gpu=gpu, program=program, **given)
    return flag_lines(found, program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_flags_have_the_layout_and_are_a_script(run, tmp_path, program):
    code, out, _ = run(*SMALL, "--flags", program)
    assert code == 0
    assert NAMED[program] in out
    found = json.loads(run(*SMALL, "--flags", program, "--format", "json")[1])
    assert found["schema"] == "flopwise.flags/1"
    assert any(NAMED[program] in line for line in found["lines"])
    assert run(*SMALL, "--flags", program, "-o", "run.txt")[0] == 0
    assert (tmp_path / "run.txt").read_text() == out == run(*SMALL, "--flags", program, "--full")[1]
    if program == "accelerate":
        compile(out, "run.txt", "exec")
        return
    typed = "\n".join(line for line in out.splitlines() if not line.startswith("#"))
    assert all(line.endswith(" \\") for line in typed.splitlines()[:-1])
    assert shlex.split(typed.replace("\\\n", " ")) == shlex.split(" ".join(found["lines"]))


@pytest.mark.parametrize(
    ("model", "given", "wanted"),
    [
        ("llama3-405b", {"gpus": 16384, "tp": 8, "pp": 16, "virtual": 8}, {EMBEDDING, LOSS}),
        (
            "qwen3-235b-a22b",
            {"gpus": 512, "pp": 8, "tp": 4, "cp": 1, "ep": 8, "virtual": 2, "micro_batch": 1},
            {EMBEDDING, LOSS},
        ),
        ("llama3-8b", {"gpus": 16, "pp": 2, "set": {"n_layers": 31}, "virtual": 1}, {LOSS}),
        ("llama3-8b", {"gpus": 16, "pp": 2, "virtual": 1}, set()),
    ],
)
def test_embedding_and_loss_count_as_layers_where_only_then_parts_are_equal(model, given, wanted):
    typed, _ = lines("megatron", model, **given)
    assert {line for line in typed if line in (EMBEDDING, LOSS)} == wanted
    assert not any("layout" in line for line in typed)


def test_layers_that_do_not_divide_are_written_out():
    typed, _ = lines("megatron", "deepseek-v3", gpus=2048, pp=16)
    assert "--pipeline-model-parallel-layout 'Et*3|(t*4|)*13t*3|t*3L'" in typed
    for wanted in ("--num-experts 256", "--moe-router-topk 8", "--num-layers 61", "--multi-latent-attention"):
        assert wanted in typed


@pytest.mark.parametrize("layers", [3, 31, 61, 80, 94, 126])
@pytest.mark.parametrize("parts", [2, 3, 4, 5, 16, 32])
def test_a_written_pipeline_has_every_layer_and_part_once(layers, parts):
    if parts > layers + 2:
        return
    text = pipeline_layout(layers, parts)
    flat = re.sub(r"\(([^)]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    flat = re.sub(r"t\*(\d+)", lambda found: "t" * int(found[1]), flat)
    assert flat.count("t") == layers
    assert flat.count("|") == parts - 1
    assert (flat[0], flat[-1]) == ("E", "L")


def test_what_megatron_demands_beside_a_flag():
    ranks, _ = lines("megatron", "llama3-8b", gpus=16, tp=4)
    assert ranks[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert {"--sequence-parallel", "--tp-comm-overlap", "--num-layers 32", "--hidden-size 4096"} <= set(ranks)
    sharded, _ = lines("megatron", "llama3-8b", gpus=16, tp=4, fsdp=True)
    assert {"--use-megatron-fsdp", "--ckpt-format fsdp_dtensor"} <= set(sharded)
    assert not any("CONNECTIONS" in line for line in sharded)
    newer, _ = lines("megatron", "llama3-8b", gpu="b200", gpus=16, tp=4, precision="mxfp8")
    assert not any("CONNECTIONS" in line for line in newer)
    assert {"--fp8-format e4m3", "--fp8-recipe mxfp8"} <= set(newer)
    alone, _ = lines("megatron", "llama3-8b", gpus=8, tp=1, cp=1, pp=1)
    assert not any("CONNECTIONS" in line or "sequence-parallel" in line for line in alone)


def test_torchtitan_is_planned_within_what_it_runs():
    typed, notes = lines(
        "torchtitan", "llama3-8b", gpus=64, pp=4, virtual=2, precision="fp8", context=2048, global_batch=128
    )
    text = " ".join(typed)
    for wanted in (
        "pipeline_parallel_layers_per_stage 4",
        "pipeline_parallel_microbatch_size",
        "--model.converters quantize.linear.float8",
    ):
        assert wanted in text
    found = flopwise.plan("llama3-8b", gpu="h100", gpus=64, program="torchtitan")
    assert {one.layout.sharded for one in (found.best, *found.others)} <= {"none", "gradients", "weights"}
    assert found.best.layout.software == "torchtitan"
    _, notes = lines("torchtitan", "llama3-8b", gpus=64, cp=2, context_way="ulysses")
    assert any("Ulysses" in note for note in notes)


def test_accelerate_is_planned_without_a_pipeline():
    found = flopwise.plan("llama3-70b", gpu="h100", gpus=256, program="accelerate")
    assert (found.best.layout.pipeline, found.best.layout.expert) == (1, 1)
    typed, _ = flag_lines(found, "accelerate")
    assert any(f"batch_size={found.best.layout.micro_batch}" in line for line in typed)


def test_an_older_plan_says_that_the_model_is_left_out():
    found = flopwise.plan("llama3-8b", gpu="h100", gpus=8)
    _, notes = flag_lines(msgspec.structs.replace(found, shape=None), "megatron")
    assert any("--num-layers" in note and "left out" in note for note in notes)
