"""A model trained on text: it learns, it goes on to the bit where it was stopped, and what is wrong is one line."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flopwise
from flopwise.api.runs import stored_result
from flopwise.errors import Failed, FlopwiseError, Interrupted
from flopwise.records.training import GPU, LAUNCHING, LOADER, Settings, Steps
from flopwise.store import list_runs
from flopwise.store.training import read_training
from flopwise.training import checkpoint
from flopwise.training.loop import Loop
from flopwise.training.progress import TrainingProgress
from flopwise.training.step import TrainingStep, check

MODEL = {
    "set": {"d_model": 32, "d_ff": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "vocab": 270},
    "batch": 4,
    "context": 16,
}
WORDS = ["tiny", "--set", "d_model=32,d_ff=64,n_layers=1,n_heads=2,n_kv_heads=2,head_dim=16,vocab=270"]


@pytest.fixture
def train(corpus, tmp_path):
    def run(**given):
        common = {"data": corpus, "steps": 12, "log_every": 1, "device": "cpu", "runs": tmp_path, **MODEL}
        return flopwise.train("tiny", **(common | given))

    return run


class StopsAt(TrainingProgress):
    """Stops a training as a kill or a Ctrl-C would, after a step."""

    def __init__(self, step, how):
        self.step, self.how = step, how

    def steps(self, row):
        if row.step == self.step:
            self.how()


def killed():
    raise SystemError("killed")


def losses(training):
    return [loss for row in training.steps for loss in row.losses]


def test_a_model_learns_text_from_nothing(text, tmp_path):
    found = flopwise.train(
        "tiny", text=text, steps=60, rate=1e-2, log_every=20, device="cpu", runs=tmp_path, **(MODEL | {"batch": 8})
    )
    assert losses(found)[0] == pytest.approx(math.log(270), abs=0.4)
    assert found.steps[-1].evaluation < 3.5 < losses(found)[0]
    assert found.status == "finished"
    assert len(losses(found)) == found.last_step == 60
    assert [len(row.losses) for row in found.steps] == [1, 19, 20, 20]  # the first step stands alone
    assert (found.path / "corpus" / "tokenizer.json").is_file()
    assert list_runs(tmp_path)[0].complete


@pytest.mark.parametrize("recipe", [{}, {"precision": "bf16"}, {"optimizer": "adamw-loop"}, {"loss": "chunked"}])
def test_killed_and_resumed_gives_the_same_losses_to_the_bit(train, recipe):
    whole = losses(train(**recipe))
    with pytest.raises(SystemError):
        train(checkpoint_every=5, progress=StopsAt(8, killed), **recipe)
    run = list_runs(train(steps=1).path.parent)[1]
    assert read_training(run.path).status == "not finished"
    again = flopwise.train(resume=run.path, device="cpu")
    assert losses(again) == whole
    assert again.begun.step == 5
    weights = [checkpoint.read(checkpoint.newest(one.path))[2]["model"] for one in list_runs(run.path.parent)[1:]]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(train):
    whole = losses(train())
    with pytest.raises(Interrupted) as stopped:
        train(progress=StopsAt(7, lambda: signal.raise_signal(signal.SIGINT)))
    found = stopped.value.result
    assert (found.status, found.last_step) == ("stopped", 8)  # the row of step 7 was being written
    assert f"flopwise train --resume {found.path.name}" in str(found)
    assert losses(flopwise.train(resume=found.path, device="cpu")) == whole


def test_weights_that_are_not_numbers_are_not_kept(train, monkeypatch):
    def spoiled(self):
        update(self)
        if self.steps == 6:
            next(self.model.parameters()).data.fill_(math.nan)

    update = TrainingStep._finish
    monkeypatch.setattr(TrainingStep, "_finish", spoiled)
    with pytest.raises(Failed, match="the update of step 6 made weights") as failed:
        train(steps=9, checkpoint_every=3)
    assert [path.name for path in (failed.value.result.path / "checkpoints").iterdir()] == ["step-00000003.pt"]


def test_a_loss_that_is_not_a_number_stops_with_its_step(train, monkeypatch):
    real = TrainingStep.train_on

    def broken(self, batches):
        real(self, batches)
        if self.steps == 7:
            self.last_loss.fill_(math.nan)

    monkeypatch.setattr(TrainingStep, "train_on", broken)
    with pytest.raises(Failed, match="the loss of step 7 is not a number") as failed:
        train(log_every=5, checkpoint_every=5)
    found = failed.value.result
    assert losses(found)[6] is None
    assert checkpoint.newest(found.path).name == "step-00000005.pt"  # none after it
    assert "Failed after step" in str(found)


def test_batches_that_are_accumulated_are_one_large_batch(train):
    large, parts = train(batch=4), train(batch=2, accumulate=2)
    assert losses(parts) == pytest.approx(losses(large), rel=1e-4)


def test_another_seed_is_evaluated_on_the_same_text(train):
    """With a rate of zero the weights differ by their seed alone: the same weights have the same loss."""
    first, second = train(steps=1, rate=0.0, seed=0), train(steps=1, rate=0.0, seed=1)
    assert first.steps[-1].evaluation != second.steps[-1].evaluation
    states = [checkpoint.newest(one.path) for one in (first, second)]
    states[1].write_bytes(states[0].read_bytes())
    again = flopwise.train(resume=second.path, steps=2, device="cpu")
    assert again.steps[-1].evaluation == first.steps[-1].evaluation


def test_the_learning_rate_and_the_clipping_are_as_asked(train):
    found = train(rate=0.5, warmup_steps=4, clip=0.01, steps=8)
    assert [row.rate for row in found.steps][:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert found.steps[-1].rate == pytest.approx(0.05)
    assert all(row.norms[0] > 0.01 for row in found.steps)  # the norm is of before
    assert train(clip=0.0, steps=2).steps[0].norms == ()


@pytest.mark.parametrize(
    ("waited", "behind", "limit"),
    [(20, 50, LOADER), (1, 2, LAUNCHING), (1, 50, GPU), (1, None, ""), (20, None, LOADER)],
)
def test_what_steps_waited_for_is_named(waited, behind, limit):
    """Launches wait for a full queue: how long they took says nothing, how far the GPU was behind does."""
    row = Steps(step=2, losses=(1.0, 1.0), rate=0.1, wall_ns=200, waited_ns=waited, launched_ns=190, behind_ns=behind)
    assert row.limited_by == limit


def test_a_loader_that_stalls_is_named_on_the_screen(train, monkeypatch):
    real = Loop._one

    def slow(self, stream):
        time.sleep(0.02)
        self.clock.waited_ns += 20_000_000
        real(self, stream)

    monkeypatch.setattr(Loop, "_one", slow)
    found = train(steps=20, log_every=5)
    assert "The loader stalls" in str(found)
    assert "waiting for data" in str(found)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"steps": 0}, "steps = 0 is not allowed"),
        ({"rate": -1.0}, "rate = -1.0 is not allowed"),
        ({"accumulate": 0}, "accumulate = 0 is not allowed"),
        ({"log_every": 0}, "log_every = 0 is not allowed"),
        ({"overlap": "on", "clip": 1.0}, "overlap = 'on' and --clip do not go together"),
        ({"context": 100_000}, "too few for a context of 100,000"),
        ({"data": "/nowhere"}, "/nowhere holds no corpus"),
    ],
)
def test_bad_settings_are_one_line_and_leave_no_run(train, tmp_path, given, error):
    with pytest.raises(FlopwiseError, match=error):
        train(**given)
    assert list_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "vocab", "error"),
    [
        (b"", 270, "there is no text"),
        (b"\xff\xfe text " * 50, 270, "is not UTF-8"),
        (b"text " * 50, 255, "a vocabulary of 255 tokens"),
        (b"text " * 50, 10_000_000, "a vocabulary of 10,000,000"),
    ],
)
def test_bad_text_is_one_line_and_leaves_no_run(tmp_path, content, vocab, error):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    model = MODEL | {"set": MODEL["set"] | {"vocab": vocab}}
    with pytest.raises(FlopwiseError, match=error):
        flopwise.train("tiny", text=path, device="cpu", runs=tmp_path / "runs", **model)
    assert not (tmp_path / "runs").exists() or list_runs(tmp_path / "runs") == []


def test_a_vocabulary_smaller_than_the_corpus_is_refused(train):
    with pytest.raises(FlopwiseError, match="the corpus has tokens up to"):
        train(set=MODEL["set"] | {"vocab": 260})


def test_checkpoints_that_are_cut_off_or_of_another_model_are_one_line(train):
    found = train(steps=2)
    path = checkpoint.newest(found.path)
    spec = found.header.trials[0].workload.subject
    other = flopwise.workload("tiny", set=MODEL["set"] | {"n_layers": 2}).subject
    with pytest.raises(FlopwiseError, match="is of another model: n_layers 1 instead of 2"):
        checkpoint.read(path, other)
    for damage in (path.read_bytes()[:-5000], b"", b"PK\x03\x04 nothing", b"\x80\x04cos\nsystem\n."):
        path.write_bytes(damage)
        with pytest.raises(FlopwiseError, match="is no whole checkpoint of flopwise"):
            checkpoint.read(path, spec)


def test_a_full_disk_keeps_the_checkpoint_before(train, monkeypatch):
    real = torch.save

    def full(content, file):
        if content["step"] > 4:
            raise OSError(28, "No space left on device")
        real(content, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Failed, match="no space left on device") as failed:
        train(checkpoint_every=4)
    folder = failed.value.result.path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000004.pt"]


def test_resume_takes_everything_from_its_run_but_the_end(train):
    found = train(steps=4)
    with pytest.raises(FlopwiseError, match="has all of its 4 steps"):
        flopwise.train(resume=found.path, device="cpu")
    with pytest.raises(
        FlopwiseError, match="--resume takes everything but --steps and --device from its run, and batch"
    ):
        flopwise.train(resume=found.path, batch=8)
    assert flopwise.train(resume=found.path, steps=6, device="cpu").last_step == 6


def test_a_run_is_shown_listed_and_reported(train, tmp_path):
    found = train()
    assert stored_result(found.path).steps == found.steps
    assert "Trained: the loss" in str(found)
    page = flopwise.report(found.path, output=tmp_path / "page.html").read_text()
    assert "The loss of every batch" in page
    assert "Trained: the loss" in flopwise.report(found.path, output=tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("recipe", "settings", "error"),
    [
        ({"overlap": "on"}, {"clip": 0.0, "accumulate": 2}, "--accumulate"),
        ({"overlap": "on"}, {"clip": 0.0, "world": 2}, "several processes"),
        ({"graph": "on"}, {"world": 2}, "graph = 'on' is for one process"),
    ],
)
def test_levers_that_do_not_go_together_are_refused(recipe, settings, error):
    with pytest.raises(FlopwiseError, match=error):
        check(flopwise.workload("tiny", **recipe).recipe, Settings(steps=1, data="", rate=0.1, **settings))


def command(corpus, runs, *more):
    sizes = ["--batch", "2", "--context", "16", "--data", str(corpus), "--log-every", "1", "--device", "cpu", "-q"]
    return ["flopwise", "train", *WORDS, *sizes, "--runs", str(runs), *more]


@pytest.mark.slow
def test_two_processes_train_as_one_with_their_batches(corpus, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    together = command(corpus, tmp_path / "two", "--steps", "5")
    subprocess.run([*start, *together], check=True, env=environment, timeout=300)
    alone = command(corpus, tmp_path / "one", "--steps", "5", "--batch", "4")
    subprocess.run([sys.executable, "-m", *alone], check=True, env=environment, timeout=300)
    two, one = (read_training(list_runs(tmp_path / name)[0].path) for name in ("two", "one"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert two.begun.settings.world == 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", [3, 6, 11])
def test_killed_at_any_moment_it_goes_on_to_the_same_losses(train, corpus, tmp_path, moment):
    whole = losses(train(steps=400, batch=2, checkpoint_every=3))
    runs = tmp_path / "killed"
    asked = command(corpus, runs, "--steps", "400", "--checkpoint-every", "3")
    process = subprocess.Popen([sys.executable, "-m", *asked])
    rows = lambda: sum(one.read_bytes().count(b"\n") for one in runs.glob("*/training.jsonl"))  # noqa: E731
    while rows() < moment * 5 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    run = list_runs(runs)[0].path
    assert losses(flopwise.train(resume=run, device="cpu")) == whole
    assert not list(Path(run, "checkpoints").glob(".*"))
