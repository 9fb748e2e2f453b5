"""Each integration against the library itself: its steps are found, the run is stored, the screen is printed."""

import gzip
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopwise.store import StoredRun, list_runs


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWISE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def _only_run(runs) -> StoredRun:
    (one,) = list_runs(runs)
    return StoredRun.load(runs / one.id)


def _data():
    return TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))


@pytest.mark.slow
def test_transformers_trainer(runs, tmp_path, capsys):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from flopwise.integrations.transformers import FlopwiseCallback

    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (64, 8))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=3000,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    model = transformers.LlamaForCausalLM(config)
    callback = FlopwiseCallback(steps=5, traced=1, stop=True)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert trainer.state.global_step < 3000
    point = _only_run(runs).points[0]
    assert len(point.times().wall_ns) == 5
    assert point.loop.micro_steps == 2
    assert point.trace_file
    assert "5 steps timed" in capsys.readouterr().out


def test_lightning_trainer(runs, tmp_path, capsys):
    lightning = pytest.importorskip("pytorch_lightning")
    from flopwise.integrations.lightning import FlopwiseCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_epochs=50,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
        callbacks=[FlopwiseCallback(steps=5, traced=1, stop=True)],
    )
    trainer.fit(Module(), DataLoader(_data(), batch_size=2))
    assert trainer.current_epoch < 49
    point = _only_run(runs).points[0]
    assert len(point.times().wall_ns) == 5
    assert point.trace_file
    assert "5 steps timed" in capsys.readouterr().out


@pytest.mark.slow
def test_accelerate_loop(runs, capsys):
    accelerate = pytest.importorskip("accelerate")
    from flopwise.integrations.accelerate import FlopwiseKwargs

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=2))
    with accelerator.profile(FlopwiseKwargs(steps=5, traced=1)) as profiler:
        for inputs, targets in loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    assert len(_only_run(runs).points[0].times().wall_ns) == 5
    assert "5 steps timed" in capsys.readouterr().out


def test_torchtitan_profiler(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    tools = pytest.importorskip("torchtitan.tools.profiler")
    from flopwise.integrations.torchtitan import trace_post_processor

    config = tools.Profiler.Config(
        enable_profiling=True, profile_freq=4, profiler_warmup=1, trace_post_processor=trace_post_processor()
    )
    profiler = tools.Profiler(config, base_folder=str(tmp_path))
    model = nn.Linear(16, 4)
    with profiler.active(base_folder=str(tmp_path)) as active:
        for _ in range(5):
            model(torch.ones(2, 16)).sum().backward()
            active.step()
    assert "rank0_trace" in capsys.readouterr().out


def test_a_trace_that_cannot_be_explained_does_not_end_a_job(tmp_path, capsys):
    pytest.importorskip("torchtitan.config.function")
    from flopwise.integrations.torchtitan import explain_trace

    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": []}).encode()))
    explain_trace(str(path))
    assert capsys.readouterr().out.startswith("flopwise: ")


def test_a_loop_that_is_too_short_is_one_line(runs, capsys):
    from flopwise.api.watch import Watch

    watch = Watch()
    watch.open()
    watch.show()
    assert capsys.readouterr().out == "flopwise: no step of an optimizer was seen\n"
    assert not runs.exists()
