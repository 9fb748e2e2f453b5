"""`flopwise roofline`, and `account` of steps that only torch knows, as a user meets them."""

import json
from pathlib import Path

import pytest

from flopwise.cli.main import main

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "trace" / "fixtures"
TRACE = FIXTURES / "h200-small-fp32-naive-2steps.kineto.json.gz"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(tmp_path / "ceilings"))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent / "capture"))
    monkeypatch.delenv("FLOPWISE_RUNS", raising=False)

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return ended.value.code, *capsys.readouterr()

    return command


def test_a_workload_and_a_trace(run, tmp_path):
    code, out, _ = run("roofline", "tiny", "--gpu", "h200", "--format", "json")
    assert (code, json.loads(out)["schema"]) == (0, "flopwise.roofline/1")
    code, out, _ = run("roofline", TRACE, "-o", "roofline.svg")
    assert (code, "at most" in out) == (0, True)
    assert (tmp_path / "roofline.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiny",), "for which GPU"),
        (("tiny", "--gpu", "voodoo"), "there is no GPU"),
        (("tiny", "--gpu", "cpu"), "not known"),
        ((FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz",), "no op with the sizes and types"),
        (("last",), "no run"),
        (("tiny", "--gpu", "h200", "-o", "x.gif"), "names no format"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(run, words, said):
    code, out, err = run("roofline", *words)
    assert (code, out, err.count("\n")) == (2, "", 2)
    assert said in err


@pytest.mark.parametrize("target", ["op:attention", "py:steps:matmul"])
def test_an_operation_and_a_step_of_ones_own_are_run_dry(run, target):
    code, out, err = run("account", target, "--gpu", "h200", "--format", "json")
    assert code == 0, err
    content = json.loads(out)
    assert content["gpus"][0]["predicted_ns"] > 0
    assert "dry run" in content["notes"][0]


def test_what_needs_a_spec_is_refused_for_them(run):
    code, _, err = run("account", "op:attention", "--gpu", "h200", "--tokens", "15T")
    assert (code, "own models" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "parameters", "dtype"), [("half", 1024 * 1024 + 1024, "bf16"), ("nothing", 0, "fp32")]
)
def test_a_step_of_ones_own_is_counted_in_its_own_precision(run, tmp_path, monkeypatch, name, parameters, dtype):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def half(device):\n"
        "    model = torch.nn.Linear(1024, 1024, device=device, dtype=torch.bfloat16)\n"
        "    x = torch.zeros(128, 1024, device=device, dtype=torch.bfloat16)\n"
        "    return lambda: model(x)\n"
        "def nothing(device):\n"
        "    return lambda: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, err = run("account", f"py:own:{name}", "--gpu", "h100", "--measured", "20us", "--format", "json")
    assert code == 0, err
    told = json.loads(out)
    assert told["parameters"] == parameters
    if parameters:
        peak = {"bf16": 989.4e12}[dtype]
        assert told["gpus"][0]["mfu_measured"] == pytest.approx(2 * 128 * 1024 * 1024 / 20e-6 / peak, rel=0.01)


def test_a_config_file_is_a_workload_and_no_trace(tmp_path, run):
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, '
        '"num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 128}'
    )
    code, out, _ = run("roofline", f"hf:{path}", "--gpu", "h100", "--context", "64")
    assert (code, "matmul" in out) == (0, True)


def test_a_spreadsheet_has_every_kind_with_its_bytes(run):
    code, out, _ = run("roofline", TRACE, "--format", "csv")
    lines = out.splitlines()
    header = lines[1].split(",")
    assert (code, {"n_bytes", "flops", "bytes_are"} <= set(header)) == (0, True)
    assert lines.index("") > 80


def strange(path):
    """A trace with shapes, of which no rule fits."""
    args = {"Input Dims": [[4, 4]], "Input type": ["c10::Secret"], "Input Strides": [[4, 1]], "Concrete Inputs": [""]}
    common = {"ph": "X", "pid": 1, "tid": 1}
    events = [
        common | {"cat": "cpu_op", "name": "aten::neg", "ts": 0, "dur": 50, "args": args},
        common | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1, "args": {"correlation": 1}},
        common
        | {"cat": "kernel", "name": "k", "ts": 9, "dur": 9, "args": {"correlation": 1, "device": 0, "stream": 7}},
    ]
    device = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "computeMajor": 9, "numSms": 132}
    path.write_text(json.dumps({"deviceProperties": [device], "traceEvents": events}))
    return path


def test_where_no_rule_fits_the_list_says_so(run, tmp_path):
    path = strange(tmp_path / "t.json")
    code, out, _ = run("roofline", path)
    assert (code, "Not placed" in out, "a type that is not counted" in out) == (0, True, True)
    code, _, err = run("roofline", path, "-o", "x.svg")
    assert (code, "is not drawn" in err) == (2, True)
    code, _, _ = run("report", path, "-o", "x.md")
    text = (tmp_path / "x.md").read_text()
    assert (code, "How far from the limit" in text, "a type that is not counted" in text) == (0, True, True)


def test_without_shapes_the_report_says_why_there_is_no_roofline(run, tmp_path):
    code, _, _ = run("report", FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz", "-o", "x.md")
    text = (tmp_path / "x.md").read_text()
    section = text[text.index("How far from the limit") :]
    assert (code, "No roofline: h200-small" in section[:200]) == (0, True)
    assert "One step over time" not in text  # pictures alone, and none are drawn


def test_the_report_names_the_table_once_measured(run, tmp_path):
    run("report", TRACE, "-o", "x.md")
    text = (tmp_path / "x.md").read_text()
    assert "measured (measured)" not in text
    assert "on NVIDIA H200" in text
    run("report", TRACE, "-o", "x.html")
    assert (tmp_path / "x.html").read_text().count("aten::") > 60  # every kind, for whoever sorts them
