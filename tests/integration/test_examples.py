"""The scripts in examples/ run as they say, and end with their screen."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(tmp_path):
    """Run a command with an example; what it printed."""

    def run(*words: str) -> str:
        environment = os.environ | {"FLOPWISE_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "steps timed: " in done.stdout
        assert len(list(tmp_path.glob("*/points.jsonl"))) == 1
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_script_as_it_is(example):
    small = ("--layers", "1", "--width", "64", "--batch", "2", "--context", "16", "--accumulate", "2")
    shown = example("-m", "flopwise", "run", "--steps", "5", str(EXAMPLES / "gpt.py"), *small)
    assert "step 0: loss" in shown
    assert "2 backward passes a step" in shown


@pytest.mark.slow
def test_a_loop_watched_from_inside(example):
    example(str(EXAMPLES / "plain_loop.py"))


@pytest.mark.slow
def test_several_processes_are_one_run(example, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    shown = example(*torchrun, "-m", "flopwise", "run", "--steps", "5", str(EXAMPLES / "ddp.py"))
    together = "2 ranks:|of the mean rank's step"  # on a busy machine one may hold up the other
    assert re.search(together, " ".join(shown.split()))
    (traces,) = tmp_path.glob("*/traces")
    assert sorted(path.name for path in traces.iterdir()) == ["rank0.kineto.json.gz", "rank1.kineto.json.gz"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "needs"), [("trainer", "accelerate"), ("lightning_module", "pytorch_lightning")])
def test_a_trainer_with_a_callback(example, name, needs):
    pytest.importorskip(needs)
    example(str(EXAMPLES / f"{name}.py"))


def test_a_step_of_a_script_is_predicted(cli):
    ended = cli("account", EXAMPLES / "gpt.py:make_step", "--set", "layers=2,width=64", "--gpu", "h100")
    assert ended.returncode == 0, ended.stderr
    assert "A step takes about" in ended.stdout


@pytest.mark.slow
def test_a_step_of_a_hugging_face_model_is_predicted(cli):
    pytest.importorskip("transformers")
    ended = cli("account", EXAMPLES / "hf_step.py:make_step", "--gpu", "h100")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_recipe_is_applied(example, tmp_path):
    (tmp_path / "fast.toml").write_text('optimizer = "fused"')
    small = (
        "--layers",
        "1",
        "--width",
        "64",
        "--batch",
        "2",
        "--context",
        "16",
        "--recipe",
        str(tmp_path / "fast.toml"),
    )
    assert "AdamW as fused" in example("-m", "flopwise", "run", "--steps", "5", str(EXAMPLES / "gpt.py"), *small)
