"""Runs and checkpoints that were cut off, moved, changed or made by someone else; settings that would be ignored."""

import errno
import json
import math
import os
import shutil

import pytest
import torch

import flopwise
from flopwise.analysis.training import progressed
from flopwise.errors import FlopwiseError
from flopwise.lm import tokenizer as bpe
from flopwise.lm.data import prepare
from flopwise.lm.sampling import choose
from flopwise.records.generated import Generated
from flopwise.render.train_view import sparkline, train_view
from flopwise.store import rows
from flopwise.store.training import read_training
from flopwise.training import checkpoint
from flopwise.training.progress import TrainingProgress
from unsealed import unseal

MODEL = {"d_model": 32, "d_ff": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "vocab": 270}
SIZES = {"batch": 2, "context": 16, "set": MODEL, "log_every": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return flopwise.train("tiny", text=text, steps=4, checkpoint_every=2, runs=runs, **SIZES)


@pytest.fixture
def copy(trained, tmp_path):
    """The run as another machine has it, where the first is not."""
    path = tmp_path / trained.path.name
    shutil.copytree(trained.path, path)
    away = trained.path.with_name("away")
    trained.path.rename(away)
    yield path
    away.rename(trained.path)


def losses(training):
    return [loss for row in training.steps for loss in row.losses]


def test_a_row_that_was_cut_off_does_not_spoil_what_follows(copy, trained):
    lines = (copy / "training.jsonl").read_bytes().split(b"\n")
    (copy / "training.jsonl").write_bytes(b"\n".join(lines[:4]) + b"\n" + lines[4][:40])  # steps 1 to 3, and a part
    (copy / "checkpoints" / "step-00000004.pt").unlink()
    (copy / "sums.json").unlink()  # it is written as a run is closed
    again = flopwise.train(resume=copy, device="cpu")
    assert losses(again) == losses(trained)
    assert read_training(copy).status == "finished"
    assert (copy / "training.torn-1").read_bytes() == lines[4][:40]


def test_a_full_disk_leaves_no_part_of_a_row(tmp_path, monkeypatch):
    def full(fd, content):
        os.write(fd, content[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    rows.append_row(tmp_path / "rows", {"step": 1})
    with monkeypatch.context() as there:
        there.setattr(rows, "write_all", full)
        with pytest.raises(FlopwiseError, match="no space left"):
            rows.append_row(tmp_path / "rows", {"step": 2})
    rows.append_row(tmp_path / "rows", {"step": 3})
    found = rows.read_rows(tmp_path / "rows", dict, "steps")
    assert ([row["step"] for row in found.rows], found.warnings) == ([1, 3], [])
    assert (tmp_path / "rows").read_text().count("\n") == 2


def test_a_run_that_was_moved_finds_its_corpus(copy):
    assert flopwise.generate(copy, tokens=2, device="cpu").step == 4
    assert flopwise.train(resume=copy, steps=5, device="cpu").last_step == 5


@pytest.mark.parametrize(
    "given", [{"seed": 1}, {"accumulate": 2}, {"log_every": 5}, {"evaluate_every": 1}, {"tensorboard": True}]
)
def test_what_resume_would_ignore_is_refused(trained, given):
    with pytest.raises(FlopwiseError, match=f"{next(iter(given))} is given too"):
        flopwise.train(resume=trained.path, steps=5, device="cpu", **given)


def without(name):
    return lambda content: content["state"].pop(name)


class Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without("model"), "its state has no model"),
        (lambda content: content.update(state=[1]), "its state has no model"),
        (lambda content: content.update(step=-5), "it is of step -5"),
        (lambda content: content["state"].update(steps="x"), "its state of step x"),
        (lambda content: content["state"].update(model={}), "does not fit"),
        (lambda content: content["state"].update(optimizers=[]), "does not fit"),
        (lambda content: content["state"].update(optimizers=[{"state": {}, "param_groups": []}]), "does not fit"),
        (lambda content: content["state"].update(scaler=Code()), "could run code, and is not read"),
    ],
)
def test_a_checkpoint_that_is_malformed_is_one_line_and_runs_nothing(copy, change, error, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = checkpoint.newest(copy)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    with pytest.raises(FlopwiseError, match=error):
        flopwise.train(resume=copy, steps=6, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_tensor_is_no_checkpoint(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "step-1.pt")
    with pytest.raises(FlopwiseError, match="is no whole checkpoint of flopwise"):
        checkpoint.read(tmp_path / "step-1.pt")


def test_a_checkpoint_with_one_other_bit_is_not_read(copy):
    path = checkpoint.newest(copy)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(FlopwiseError, match="is no whole checkpoint of flopwise"):
        checkpoint.read(path)


def test_weights_that_are_not_numbers_say_so(copy):
    path = checkpoint.newest(copy)
    content = torch.load(path, weights_only=True)
    content["state"]["model"] = {name: value * math.nan for name, value in content["state"]["model"].items()}
    torch.save(content, path)
    with pytest.raises(FlopwiseError, match="logits are not numbers"):
        flopwise.generate(copy, tokens=2, device="cpu")


def change_settings(run, fields):
    lines = [json.loads(line) for line in (unseal(run) / "training.jsonl").read_text().splitlines()]
    lines[0]["settings"] |= fields
    (run / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("field", [{"accumulate": 10**12}, {"log_every": 0}, {"evaluation_batches": -1}])
def test_settings_of_a_run_are_checked_before_it_goes_on(copy, field):
    change_settings(copy, field)
    with pytest.raises(FlopwiseError, match="is not allowed"):
        flopwise.train(resume=copy, steps=5, device="cpu")


def test_one_process_goes_on_for_two_with_the_same_text(copy, trained):
    """One process accumulates what two took together."""
    change_settings(copy, {"world": 2})
    again = flopwise.train(resume=copy, steps=5, device="cpu")
    assert (again.begun.settings.world, again.begun.settings.accumulate) == (1, 2)
    assert again.tokens_per_step == 2 * trained.tokens_per_step


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-300, 1.0), (1e-40, 0.9), (1e-30, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_extremes_of_sampling_take_the_likeliest(temperature, top_p):
    assert choose(torch.tensor([[0.0, 9.0, 8.5]]), temperature, top_p).tolist() == [1]


def test_a_tokenizer_without_an_end_cuts_no_text(text, tmp_path):
    letters = bpe.train([text], 256, special=())
    prepare([text], letters, tmp_path / "corpus", held_out=0.1)
    found = flopwise.train("tiny", data=tmp_path / "corpus", steps=1, runs=tmp_path, **SIZES)
    path = checkpoint.newest(found.path)
    content = torch.load(path, weights_only=True)
    content["state"]["model"] = {name: value * 0 for name, value in content["state"]["model"].items()}
    torch.save(content, path)  # token 0, for ever
    assert flopwise.generate(found.path, tokens=4, temperature=0.0, device="cpu").texts == ("\0\0\0\0",)


def test_prompts_that_are_read_meanwhile_are_no_new_tokens():
    """Prompts of 1 and 5 tokens, 3 new ones each: 2 of each came in 6 steps of a second."""
    common = {"run": "r", "step": 1, "device": "cpu", "prompts": ("a", "b"), "texts": ("", ""), "prompt_tokens": 6}
    times = {"prefill_ns": 1, "decode_ns": 6 * 10**9, "decode_steps": 6}
    found = Generated(**common, **times, new_tokens=6, cache_bytes=1, cache="fp32", weight_bytes=1)
    assert found.tokens_per_s == pytest.approx(4 / 6)


@pytest.mark.parametrize("values", [[-1e308, 1e308], [1e308, 1e308, 1e308], [0.0, 0.0]])
def test_a_curve_of_any_numbers_is_drawn(values):
    assert len(sparkline(values * 100, 10)) <= 10


def test_a_corpus_of_no_tokens_is_shown(copy):
    text = (unseal(copy) / "training.jsonl").read_text().replace('"tokens":', '"tokens":0,"was":')
    (copy / "training.jsonl").write_text(text)
    assert "epochs" in str(read_training(copy))


def test_the_speed_is_of_the_machine_that_it_went_on_with(copy):
    text = (unseal(copy) / "training.jsonl").read_text().replace('"wall_ns":', '"wall_ns":1,"was":')
    (copy / "training.jsonl").write_text(text)
    again = flopwise.train(resume=copy, steps=6, device="cpu")
    assert progressed(again).step_ns > 1000


def test_another_machine_that_it_went_on_with_is_named_and_has_its_own_peak(copy):
    rows = [json.loads(line) for line in (unseal(copy) / "training.jsonl").read_text().splitlines()]
    rows[0]["peak_flops_s"] = 1e12
    rows[0]["environment"] |= {"cpu": "Z80", "torch": "1.0"}
    (copy / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Z80" not in str(read_training(copy))
    told = []

    class Told(TrainingProgress):
        def note(self, text):
            told.append(text)

    again = flopwise.train(resume=copy, steps=6, device="cpu", progress=Told())
    assert "from step 5 on with " in told[-1]
    assert "before with Z80, torch 1.0" in told[-1].replace("cores, ", "")
    assert "Z80" in str(again)
    shares = [row["mfu"] is None for row in train_view(again).tables[0].rows]
    assert shares == [False] * 4 + [True] * 2  # the peak of a CPU is not known
