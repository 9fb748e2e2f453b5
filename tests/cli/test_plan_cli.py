"""`flopwise plan`, as typed: the screen, the files, the flags, and wrong inputs in one line each."""

import json
import re
from types import SimpleNamespace

import pytest
from tests.analysis.test_exchanges import point
from tests.rank_traces import Job, write

import flopwise
import flopwise.api.plan as api
from flopwise.records.plan import read_plan

ASKED = ("plan", "llama3-8b", "--gpu", "h100", "--gpus", "64", "--tokens", "15T", "--price", "2.5")


@pytest.fixture(scope="module")
def asked(cli):
    """The plan as JSON, made once."""
    return cli(*ASKED, "--format", "json")[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "tiny"])
def test_the_answer_is_one_screen(run, model):
    code, out, err = run(ASKED[0], model, *ASKED[2:])
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 25
    assert all(len(line) <= 80 for line in out.splitlines())
    for words in ("GPU-hours", "at $2.5 an hour", "Layout: ", "Memory: ", "Where the", "predicted"):
        assert words in out


def test_days_hours_and_money_follow_from_the_step(asked):
    found = json.loads(asked)
    step = found["best"]["step"]
    assert found["schema"] == "flopwise.plan/1"
    assert sum(step["parts"].values()) == pytest.approx(step["wall_s"])
    steps = 15e12 / (found["batch"] * found["context"])
    assert found["days"] == pytest.approx(steps * step["wall_s"] / 86400)
    assert found["gpu_hours"] == pytest.approx(24 * 64 * found["days"])
    assert found["cost"] == pytest.approx(2.5 * found["gpu_hours"])
    assert sum(found["best"]["memory"]["owners"].values()) == pytest.approx(
        found["best"]["memory"]["peak_bytes"], rel=0.01
    )


def test_a_given_mfu_is_the_lectures_arithmetic(run):
    asked = (
        "plan",
        "llama3-70b",
        "--gpu",
        "h100",
        "--gpus",
        "1024",
        "--tokens",
        "15T",
        "--mfu",
        "0.5",
        "--format",
        "json",
    )
    found = json.loads(run(*asked)[1])
    assert found["rule_days"] * 70e9 / found["parameters"] == pytest.approx(143.9, abs=0.1)
    assert found["days"] == pytest.approx(found["step_s"] * 15e12 / (found["batch"] * found["context"]) / 86400)
    step = found["best"]["step"]
    assert step["model_flops"] / (found["step_s"] * 1024 * 989.4e12) == pytest.approx(0.5, rel=0.001)


def test_without_gpus_it_takes_the_fewest(run):
    found = flopwise.plan("llama3-70b", gpu="h100", context=4096)
    assert found.gpus == 2 ** (found.gpus.bit_length() - 1)
    with pytest.raises(flopwise.FlopwiseError, match="does not fit"):
        flopwise.plan("llama3-70b", gpu="h100", context=4096, gpus=found.gpus // 2)


def test_more_gpus_with_the_same_batch_are_not_slower():
    found = [flopwise.plan("llama3-8b", gpu="h100", gpus=n, global_batch=512) for n in (8, 64, 512)]
    assert [one.step_s for one in found] == sorted((one.step_s for one in found), reverse=True)
    for one in found:
        assert all(other.step.wall_s >= one.best.step.wall_s for other in one.others if "fit" not in other.why)
        assert one.best.memory.peak_bytes <= one.limit_bytes == 80_000_000_000


def test_groups_of_fsdp_are_kept():
    found = flopwise.plan("llama3-8b", gpu="h100", gpus=64, fsdp=True, shard_ranks=8, tp=1, pp=1, cp=1)
    assert (found.best.layout.data, found.best.layout.shard_ranks) == (64, 8)


def test_a_gpu_without_bf16_trains_in_fp16():
    found = flopwise.plan("gpt2", gpu="v100", gpus=8, link="nvlink2,ib100")
    assert found.best.layout.precision == "fp16"


@pytest.mark.slow
def test_the_file_is_read_back_and_set_beside_ranks(run, tmp_path):
    assert run(*ASKED, "-o", "plan.json")[0] == 0
    assert read_plan("plan.json") == flopwise.plan("llama3-8b", gpu="h100", gpus=64, tokens=15e12, price=2.5)
    (tmp_path / "job").mkdir()
    write(Job(case="host", ranks=8), tmp_path / "job")
    code, out, err = run("explain", "job", "--plan", "plan.json")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert re.search(r"the step +\S+ s +4.18 ms", out)
    assert "The plan is for 64 GPUs, the traces are of a job of" in out
    assert out.index("The plan is for 64 GPUs") < out.index("Planned") < out.index("times as fast")
    beside = json.loads(run("explain", "job", "--plan", "plan.json", "--format", "json")[1])["ranks"]["plan"]
    for side in ("planned_ns", "measured_ns"):
        assert sum(one[side] for one in beside["parts"]) == pytest.approx(beside[side])
    assert run("explain", "job", "--plan", "plan.json", "-o", "beside.svg")[0] == 0
    assert "measured" in (tmp_path / "beside.svg").read_text()
    assert "The plan beside the ranks" in run("explain", "job", "--plan", "plan.json", "--full")[1]


@pytest.mark.slow
def test_tables_and_pictures(run, tmp_path):
    full = run(*ASKED, "--full")[1]
    for title in ("Layouts, the best first", "Where a step's time goes", "Memory of the fullest GPU"):
        assert title in full
    assert run(*ASKED, "--format", "csv")[1].startswith("# llama3-8b on 64")
    assert "| model |" in run(*ASKED, "--format", "markdown")[1]
    assert run(*ASKED, "-o", "plan.svg")[0] == 0
    assert "GB on the fullest GPU" in (tmp_path / "plan.svg").read_text()


WRONG = [
    ("llama3-8b --gpu h100 --gpus 1023", "1023 GPUs are not whole hosts of 8 (DGX H100)", "1016 or 1024"),
    ("llama3-8b --gpu h100 --gpus 64 --tp 3", "64 GPUs do not divide into --tp 3", "a multiple of 3"),
    ("llama3-405b --gpu h100 --gpus 8", "llama3-405b does not fit on 8 GPUs", "more GPUs"),
    ("llama3-405b --gpu h100 --memory-limit 1KB", "does not fit on", "more GPUs"),
    ("llama3-8b --gpu h100 --gpus 64 --tokens 0", "'0' is not a count", "15T"),
    ("llama3-8b --gpu h100 --gpus 64 --tokens nan", "'nan' is not a count", "15T"),
    ("llama3-8b --cluster dgx-h10 --gpus 64", "there is no cluster 'dgx-h10'", "did you mean 'dgx-h100'?"),
    ("llama3-8b --gpu h10 --gpus 64", "there is no cluster 'h10'", "known"),
    ("llama3-8b --cluster none.toml", "cannot read none.toml", "cluster file"),
    ("llama3-8b --gpus 64", "no GPU is given", "--gpu h100"),
    ("llama3-8b --gpu h200 --cluster dgx-h100", "dgx-h100 has h100, not h200", "omit --gpu"),
    ("llama3-8b --gpu h100 --gpus 0", "gpus = 0 is not allowed", "whole number"),
    ("llama3-8b --gpu h100 --gpus 99999999999", "gpus = 99999999999 is not allowed", "1000000"),
    ("llama3-8b --gpu h100 --nodes 2 --gpus 64", "2 hosts of dgx-h100 have 16 GPUs, not 64", "one of"),
    ("llama3-8b --gpu h100 --gpus 64 --price -1", "price = -1.0 is not allowed", "0"),
    ("llama3-8b --gpu h100 --gpus 64 --price nan", "price = nan is not allowed", "0"),
    ("llama3-8b --gpu h100 --gpus 64 --tp 64", "32 heads do not divide among 64 tensor ranks", "fewer"),
    ("llama3-8b --gpu h100 --gpus 64 --global-batch 7 --dp 64", "a batch of 7 does not divide", "a multiple of 64"),
    ("llama3-8b --gpu h100 --gpus 64 --global-batch many", "global_batch = 'many' is not allowed", "4M-tokens"),
    ("llama3-8b --gpu h100 --gpus 64 --mfu 1.5", "'1.5' is not a share", "0.5 or 50%"),
    ("llama3-8b --gpu h100 --gpus 64 --context 0", "context = 0 is not allowed", "whole number"),
    ("llama3-8b --gpu h100 --gpus 64 --ep 8", "llama3-8b has no experts", "--ep 1"),
    ("llama3-8b --gpu h100 --gpus 64 --set n_layers=99999999999", "n_layers = 99999999999 is not allowed", "10000000"),
    ("llama3-8b --gpu h100 --gpus 64 --set layers=2", "has no field 'layers'", "n_layers"),
    ("llama3-9b --gpu h100 --gpus 64", "there is no model preset 'llama3-9b'", "did you mean"),
    ("gpt3-175b --gpu h100 --gpus 64 --context 4096", "gpt3-175b has positions for 2048 tokens", "--context 2048"),
    ("llama3-8b --gpu h100 --gpus 64 --recompute some", "recompute = 'some' is not allowed", "selective"),
    ("llama3-8b --gpu h100 --gpus 64 --precision fp7", "precision = 'fp7' is not allowed", "bf16"),
    ("llama3-8b --gpu a100 --gpus 64 --precision fp8", "A100 SXM 80 GB does not compute in fp8", "bf16, fp16"),
    ("llama3-8b --gpu h100 --gpus 64 --precision nvfp4", "H100 SXM 80 GB does not compute in nvfp4", "bf16, fp16, fp8"),
    ("llama3-8b --gpu h100 --gpus 64 --software jax", "there is no software 'jax'", "megatron"),
    ("llama3-8b --gpu h100 --gpus 64 --fsdp --sharded none", "fsdp shards the weights", "omit --fsdp"),
    ("llama3-8b --gpu h100 --gpus 64 --flags slurm", "flags = 'slurm' is not allowed", "torchrun"),
    ("llama3-8b --gpu h100 --gpus 64 --memory-limit lots", "'lots' is not a size", "40GiB"),
    ("llama3-8b --gpu h100 --gpus 64 --link wire", "there is no link 'wire'", "nvlink4"),
    ("llama3-8b --gpu cpu --gpus 8", "there is no cluster 'cpu'", "known"),
    ("hf:none.json --gpu h100", "cannot read none.json", "config.json"),
    ("llama3-8b --gpu h100 --pp 4 --schedule 1f1b --virtual 4", "1f1b has one part of the model", "interleaved"),
    ("llama3-8b --gpu h100 --pp 4 --schedule interleaved --virtual 1", "interleaved has several parts", "--virtual 2"),
    ("llama3-8b --gpu h100 --gpus 64 --dp 1 --fsdp", "one data rank has nobody to share the weights", "--dp 2"),
    ("llama3-8b --gpu h100 --shard-ranks 8 --sharded none", "shard_ranks share the weights", "omit --shard-ranks"),
    ("llama3-8b --gpu h100 -o q.png --flags megatron", "--flags prints lines, and -o asks for a picture", "FILE.txt"),
    ("llama3-70b --gpu h100 --tp 8 --pp 8 --virtual 3", "80 layers do not divide into 8 × 3 parts", "2 or 5 or 10"),
    ("llama3-8b --gpu h100 --virtual 20", "32 layers do not divide into 20 parts on each rank", "--virtual 2 or 4"),
    ("llama3-8b --gpu h100 --pp 1 --schedule interleaved", "the interleaved schedule needs a pipeline", "--pp 2"),
    ("llama3-8b --gpu h100 --pp 1 --virtual 4", "virtual = 4 needs a pipeline", "--pp 2"),
    ("llama3-8b --gpu h100 --gpus 64 --pp 2 --virtual 4 --dp 32 --global-batch 96", "does not come in rounds", "omit"),
    ("llama3-8b --gpu h100 --micro-batch 3 --global-batch 512", "divide into micro-batches of 3", "1, 2, 4"),
    ("llama3-8b --gpu h100 --micro-batch 1000000", "a micro-batch of 1000000 is more than the batch", "smaller"),
    ("llama3-8b --cluster bad.toml", "bad.toml is not valid TOML", "docs/how-to/plan.md"),
    ("llama3-8b --gpu rtx4090", "no cluster of GeForce RTX 4090", "--link pcie4,eth100"),
    ("llama3-8b --gpu h20", "no cluster of H20 96 GB is known", "--link nvlink4,ib400"),
    ("hf:odd.json --gpu h100", "model_type = 'mamba' is not a family that a plan reads", "kimi_k2"),
    ("llama3-8b --gpu h100 --schedule zero-bubble", "megatron has no zero-bubble schedule", "--software torchtitan"),
    ("llama3-8b --gpu h100 --software torchtitan --sharded optimizer", "does not shard the optimizer", "--fsdp"),
    ("llama3-8b --gpu h100 --flags accelerate --pp 2", "ParallelismConfig has no pipeline ranks", "--pp 1"),
    ("mixtral-8x7b --gpu h100 --flags accelerate --ep 8", "ParallelismConfig has no expert ranks", "--ep 1"),
    ("llama3-8b --gpu h100 --flags torchtitan --software megatron", "torchtitan does not run", "--software torchtitan"),
    (
        "llama3-8b --gpu h100 --gpus 64 --global-batch 100-tokens",
        "not near whole sequences of 8192",
        "--global-batch 1",
    ),
    ("llama3-8b --gpu h100 --gpus 64 --dp 64 --global-batch 300K-tokens", "for 64 data ranks", "--global-batch 64"),
    (
        "llama3-8b --gpu h100 --gpus 8 --tp 8 --context 8191",
        "8191 tokens of a sequence do not divide among 8",
        "--context",
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("words", "says", "hint"), WRONG, ids=[words for words, _, _ in WRONG])
def test_what_is_wrong_is_said_in_one_line(run, tmp_path, words, says, hint):
    (tmp_path / "bad.toml").write_text("x = [")
    (tmp_path / "odd.json").write_text('{"model_type": "mamba"}')
    code, out, err = run("plan", *words.split())
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("hint: ")
    assert hint in second
    assert "py:" not in second


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "flopwise.plan/1"}', '{"schema": "flopwise.plan/2"}', "[" * 9999, "\0"]
)
def test_a_file_that_is_no_plan_is_refused(run, tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    (tmp_path / "job").mkdir()
    write(Job(case="host", ranks=2), tmp_path / "job")
    code, out, err = run("explain", "job", "--plan", "bad.json")
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith("error: bad.json is not a plan")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("best", "step", "parts", "matmuls"), 1e300, "a number that is too large is impossible"),
        (("best", "step", "parts", "matmuls"), -1.0, "'matmuls' takes -1.0 seconds"),
        (("best", "step", "hidden_s"), {"x" * 999: 1e300}, "hidden_s = 1e+300 is impossible"),
        (("best", "layout", "data"), 0, "data = 0 is not allowed"),
        (("best", "layout", "recompute"), "\x1b[31m", "recompute ="),
        (("gpus",), "many", "is not a plan"),
        (("best", "step", "wall_s"), -1, "wall_s = -1 is impossible"),
        (("best", "step", "wall_s"), 0, "a step takes no time"),
        (("best", "step", "mfu"), 99, "mfu = 99.0 is not allowed"),
        (("best", "step", "parts", "matmuls"), 1e6, "the parts of a step add up to"),
        (("others", 0, "step", "wall_s"), -1, "wall_s = -1 is impossible"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(asked, tmp_path, monkeypatch, place, value, says):
    monkeypatch.chdir(tmp_path)
    found = json.loads(asked)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(found))
    with pytest.raises(flopwise.FlopwiseError) as error:
        read_plan("bad.json")
    assert error.value.message.startswith("bad.json")
    assert says in error.value.message
    assert "\x1b" not in error.value.message


def test_a_name_from_a_file_does_not_steer_the_terminal(run, tmp_path):
    found = json.loads(run(*ASKED, "--format", "json")[1])
    (tmp_path / "named.json").write_text(json.dumps(found | {"model": "\x1b[31mevil\n"}))
    (tmp_path / "job").mkdir()
    write(Job(case="host", ranks=2), tmp_path / "job")
    code, out, _ = run("explain", "job", "--plan", "named.json")
    assert code == 0
    assert "\x1b" not in out


def test_measured_links_replace_the_datasheets(run, monkeypatch):
    """A run over slow links makes the plan slower; one of the CPU's is refused."""
    points = [
        point("all-reduce", n, 1e5 + n, 8, backend="nccl", device="cuda:0") for n in (10**6, 10**9)
    ]  # 1 GB/s, where NVLink has hundreds
    stored = SimpleNamespace(sound=lambda: SimpleNamespace(points=points))
    kept = SimpleNamespace(load=lambda found: stored)
    monkeypatch.setattr(api, "StoredRun", kept)
    monkeypatch.setattr(api, "find", lambda name, root: name)
    asked = ("plan", "llama3-8b", "--gpu", "h100", "--gpus", "8", "--tp", "8", "--format", "json")
    stated, measured = (
        json.loads(run(*asked, *more)[1])["best"]["step"]["wall_s"] for more in ((), ("--measured", "x"))
    )
    assert measured > 2 * stated
    points[:] = [point("all-reduce", n, 1e5 + n, 8) for n in (10**6, 10**9)]
    code, _, err = run(*asked, "--measured", "x")
    assert code != 0
    assert "no collective of GPUs" in err


@pytest.mark.slow
def test_uneven_experts_and_an_offloaded_optimizer_are_seen(run):
    asked = ("plan", "mixtral-8x7b", "--gpu", "h100", "--gpus", "64", "--ep", "8", "--format", "json")
    even, uneven, away = (
        json.loads(run(*asked, *more)[1])["best"] for more in ((), ("--uneven", "1.5"), ("--offload",))
    )
    assert uneven["step"]["parts"]["uneven experts"] > 0 == even["step"]["parts"]["uneven experts"]
    assert "optimizer state" not in away["memory"]["owners"]
    assert run(*asked, "--uneven", "0.5")[0] != 0
