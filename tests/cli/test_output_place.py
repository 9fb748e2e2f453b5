"""-o never writes over what a command reads."""

import gzip
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from flopwise.cli.main import main

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "snapshot"))
from gen_snapshot import made  # noqa: E402

TRACE = HERE.parent / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOPWISE_RUNS", raising=False)

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return ended.value.code, capsys.readouterr().err

    return command


@pytest.fixture
def k(tmp_path):
    (tmp_path / "k.json").write_bytes(gzip.decompress(TRACE.read_bytes()))
    shutil.copy(tmp_path / "k.json", tmp_path / "j.json")
    (tmp_path / "link.json").symlink_to("k.json")
    os.link(tmp_path / "k.json", tmp_path / "hard.json")
    return tmp_path / "k.json"


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "k.json", "-o", "k.json"),
        ("explain", "k.json", "-o", "./k.json"),
        ("explain", "k.json", "-o", "hard.json"),
        ("explain", "k.json", "-o", "link.json"),
        ("explain", "link.json", "-o", "k.json"),
        ("explain", "j.json", "k.json", "-o", "k.json"),
        ("explain", "j.json", "--against", "k.json", "-o", "k.json"),
        ("roofline", "k.json", "-o", "k.json"),
        ("explain", "k.json", "--format", "csv", "-o", "k.json"),
    ],
)
def test_a_trace_stays(run, k, words):
    before = k.read_bytes()
    code, err = run(*words)
    assert (code, "would be lost" in err, len(err.splitlines())) == (2, True, 2)
    assert k.read_bytes() == before


def test_a_snapshot_stays_even_as_a_picture(run, tmp_path):
    content = pickle.dumps(made(steps=2)[0])
    for name in ("s.pickle", "s.svg"):
        (tmp_path / name).write_bytes(content)
    assert run("memory", "s.pickle", "--format", "json", "-o", "s.pickle")[0] == 2
    assert run("memory", "s.svg", "-o", "s.svg")[0] == 2
    assert all((tmp_path / name).read_bytes() == content for name in ("s.pickle", "s.svg"))


def test_a_config_stays(run, tmp_path):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("hf:config.json", f"hf:{tmp_path}"):
        assert run("account", name, "-o", "config.json")[0] == 2
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_a_runs_files_stay(run, k, tmp_path):
    traces = tmp_path / "run" / "traces"
    traces.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    shutil.copy(k, traces / "t.json")
    code, err = run("explain", "k.json", "-o", "run/traces/t.json")
    assert (code, "belongs to the run" in err) == (2, True)
    assert (traces / "t.json").read_bytes() == k.read_bytes()


def test_an_older_report_is_replaced(run, k, tmp_path):
    (tmp_path / "report.md").write_text("old")
    assert run("explain", "k.json", "-o", "report.md")[0] == 0
    assert (tmp_path / "report.md").read_text() != "old"


def test_an_older_recipe_is_replaced(run, tmp_path):
    (tmp_path / "fast.toml").write_text("")
    code, err = run("tune", "tiny", "--device", "cpu", "--budget", "no time", "--save", "fast.toml")
    assert code == 2
    assert "no time" in err
    assert "cannot write" not in err


def test_a_picture_of_a_gpus_limit_is_refused_before_a_tuning_on_the_cpu(run, tmp_path):
    code, said = run("tune", "tiny", "--device", "cpu", "-o", "limit.png")
    assert code == 2
    assert said.startswith("error: limit.png would show the limit of a GPU")
    assert not list(tmp_path.rglob("*"))
