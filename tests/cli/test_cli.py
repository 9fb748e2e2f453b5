"""The command line as a user meets it: one line and a hint for bad input, exit codes, stable JSON, nothing heavy for help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise.__main__ import main as flopwise_main
from flopwise.cli.main import VERBS
from flopwise.records.comparison import FASTER, INCONCLUSIVE, NO_DIFFERENCE, SLOWER
from in_process import in_process

STEPS = Path(__file__).parent.parent / "capture"
FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"


def flopwise(*words, cwd, **environment):
    return in_process(*words, cwd=cwd, **{"PYTHONPATH": str(STEPS)} | environment)


def flopwise_process(*words, cwd, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("FLOPWISE_RUNS", "FLOPWISE_DEBUG")}
    env |= {"PYTHONPATH": str(STEPS), "COLUMNS": "200"} | environment
    command = [sys.executable, "-m", "flopwise.cli.main", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Two runs of the tiny model in one folder."""
    cwd = tmp_path_factory.mktemp("bench")
    first = flopwise(
        "bench",
        "tiny",
        "--device",
        "cpu",
        "--samples",
        6,
        "--warmup",
        1,
        "--batch",
        1,
        "--context",
        8,
        "--format",
        "json",
        "--tag",
        "base",
        cwd=cwd,
    )
    second = flopwise("bench", "py:steps:matmul", "--device", "cpu", "--samples", 6, cwd=cwd)
    return cwd, first, second


BAD = {
    "unknown preset": (("bench", "smal"), "no model preset 'smal'", "did you mean 'small'"),
    "an empty list of implementations": (
        ("bench", "op:rope", "--impl", ""),
        "--impl names no implementation",
        "separated by commas",
    ),
    "batch 0": (("bench", "tiny", "--batch", "0"), "batch = 0", "whole number from 1"),
    "batch text": (("bench", "tiny", "--batch", "many"), "many", "--help"),
    "heads": (("bench", "small", "--set", "n_heads=7"), "n_heads = 7 does not divide d_model = 768", "allowed"),
    "unknown field": (("bench", "tiny", "--set", "heads=7"), "no field 'heads'", "n_heads"),
    "not an assignment": (("bench", "tiny", "--set", "n_heads"), "not FIELD=VALUE", "n_layers=2"),
    "lever": (("bench", "tiny", "--precision", "fp4"), "precision = 'fp4'", "bf16"),
    "lever of another": (("bench", "op:gelu", "--attention", "naive"), "means nothing to op:gelu", "activation"),
    "operation": (("bench", "op:matmull"), "no operation 'op:matmull'", "matmul"),
    "context": (("bench", "gpt2", "--context", "4096"), "context = 4096", "1024"),
    "config": (("bench", "hf:nowhere/config.json"), "cannot read", "local config.json"),
    "own step": (("bench", "py:nonsense"), "not py:module:factory", "make_step"),
    "device word": (("bench", "tiny", "--device", "gpu"), "device = 'gpu'", "cuda:N"),
    "format": (("bench", "tiny", "--format", "xml"), "format = 'xml'", "markdown"),
    "suffix": (("bench", "tiny", "-o", "x.docx"), "suffix '.docx'", ".json"),
    "no folder": (("bench", "tiny", "-o", "no/such/x.json"), "no such folder", "folder"),
    "a folder": (("bench", "tiny", "-o", "folder.json"), "folder.json: it is a folder", "name a file"),
    "recipe to a folder": (("tune", "tiny", "--save", "folder.json"), "folder.json: it is a folder", "name a file"),
    "recipe file": (("bench", "tiny", "--recipe", "none.toml"), "cannot read none.toml", "recipe"),
    "no file": (("sweep", "none.toml"), "cannot read none.toml", "sweep file"),
    "run": (("compare", "last", "last"), "no runs", "bench"),
    "tag": (("bench", "tiny", "--tag", "last"), "'last' cannot be a tag", "not beginning with 'last'"),
    "empty tag": (("sweep", "s.toml", "--tag", ""), "cannot be a tag", "letters"),
    "verb": (("benhc", "tiny"), "no verb 'benhc'", "did you mean 'bench'"),
    "option": (("bench", "tiny", "--bacth", "2"), "--bacth", "--help"),
    "profiler": (("profile", "tiny", "--with", "nsight"), "profiler = 'nsight'", "kineto, nsys"),
    "nsys without a GPU": (
        ("profile", "tiny", "--with", "nsys", "--device", "cpu"),
        "nothing for nsys to see",
        "kineto",
    ),
    "missing argument": (("bench",), "WORKLOAD", "--help"),
}


@pytest.mark.parametrize(("words", "message", "hint"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_a_hint(words, message, hint, tmp_path):
    (tmp_path / "folder.json").mkdir()
    done = flopwise(*words, cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) <= 2
    assert not hint or (lines[1].startswith("hint: ") and hint in lines[1])
    assert done.stdout == ""
    assert list(tmp_path.rglob("points.jsonl")) == []  # no run was begun


@pytest.mark.parametrize(
    "text", ["[base", "base = 3", '[base]\nworkload = "tiny"\nbatc = 2\n', "[group.a]\nbatch = 2\n", "\xff"]
)
def test_a_broken_sweep_file_is_one_line(text, tmp_path):
    (tmp_path / "s.toml").write_bytes(text.encode("latin-1"))
    done = flopwise("sweep", "s.toml", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
    assert "s.toml" in done.stderr


def test_no_gpu_here(tmp_path):
    done = flopwise("bench", "tiny", "--device", "cuda", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
    assert "device = 'cuda' is not available" in done.stderr
    assert "--device cpu" in done.stderr


def test_an_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    done = flopwise("bench", "py:steps:matmul", "--device", "cpu", "--runs", tmp_path / "file" / "runs", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)


def test_a_failed_bench_says_why_and_keeps_its_row(tmp_path):
    done = flopwise("bench", "py:steps:raises", "--device", "cpu", "-q", cwd=tmp_path)
    assert done.returncode == 2
    assert "ValueError: no luck" in done.stderr
    assert "Traceback" not in done.stderr
    assert "no luck" in next(tmp_path.rglob("points.jsonl")).read_text()


def test_a_traceback_only_with_debug(tmp_path):
    done = flopwise("bench", "smal", "--debug", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_bench_writes_documented_json(bench):
    _, first, _ = bench
    assert first.returncode == 0, first.stderr
    content = json.loads(first.stdout)
    assert content["schema"] == "flopwise.run/1"
    (point,) = content["points"]
    assert (point["status"], point["stopped"], point["warmup"]["steps"]) == ("ok", "samples", 1)
    assert [phase["phase"] for phase in point["phases"]] == ["step", "forward", "loss", "backward", "optimizer"]
    step = point["phases"][0]
    assert step["gpu"] is None
    assert step["wall"]["low_ns"] <= step["wall"]["median_ns"] <= step["wall"]["high_ns"]
    assert (step["wall"]["n"], step["wall"]["obtained"]) == (6, "measured")
    assert point["ran"]["fp32_matmul"] == "ieee"
    assert point["environment"]["torch"]


def test_compare_same_with_same_shows_no_difference(bench):
    cwd, _, _ = bench
    done = flopwise("compare", "base", "base", "--fail-above", "3%", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "no difference shown" in done.stdout


def test_a_phase_or_clock_that_was_not_measured_is_bad_input(bench):
    cwd, _, _ = bench
    for words in (("--phase", "nosuch"), ("--clock", "gpu")):
        done = flopwise("compare", "base", "base", *words, cwd=cwd)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)


def test_output_that_cannot_be_written_is_one_line(bench):
    cwd, _, _ = bench
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "flopwise.cli.main", "runs"]
        done = subprocess.run(command, cwd=cwd, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write the output")


def test_runs_are_listed_shown_tagged_and_removed(bench):
    cwd, _, second = bench
    assert second.returncode == 0, second.stderr
    listed = json.loads(flopwise("runs", "--format", "json", cwd=cwd).stdout)["runs"]
    assert [run["kind"] for run in listed] == ["bench", "bench"]
    assert "base" in listed[1]["tags"]
    assert "py:steps:matmul" in flopwise("runs", "show", "last", cwd=cwd).stdout
    assert flopwise("runs", "tag", "last", "mine", cwd=cwd).returncode == 0
    assert "wall_ns" in flopwise("runs", "show", "mine", "--format", "csv", cwd=cwd).stdout
    assert flopwise("runs", "show", "mine", "-o", "out.md", cwd=cwd).returncode == 0
    assert (cwd / "out.md").read_text().count("|") > 10
    assert flopwise("runs", "rm", "mine", cwd=cwd).returncode == 0
    assert len(json.loads(flopwise("runs", "--format", "json", cwd=cwd).stdout)["runs"]) == 1
    assert flopwise("runs", "rm", "../..", cwd=cwd).returncode == 2


@pytest.mark.slow
def test_in_turns_gives_a_verdict(tmp_path):
    done = flopwise(
        "bench",
        "tiny",
        "--device",
        "cpu",
        "--samples",
        8,
        "--context",
        8,
        "--versus",
        "context=64",
        "--format",
        "json",
        "-q",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    (pair,) = content["comparison"]["pairs"]
    assert pair["paired"]
    assert pair["ratio_low"] <= pair["ratio"] <= pair["ratio_high"]
    assert pair["verdict"] in (FASTER, SLOWER, NO_DIFFERENCE, INCONCLUSIVE)  # which: the machine's own affair
    assert content["points"][0]["paired_with"] == content["points"][1]["key"]


def test_explain_answers_for_a_trace_and_for_several(tmp_path):
    trace = FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"
    one, full = (flopwise("explain", trace, *words, cwd=tmp_path) for words in ((), ("--full",)))
    assert (one.returncode, "Launch-bound" in one.stdout, "reachable" in one.stdout) == (0, True, True)
    assert (len(one.stdout.splitlines()) <= 25, max(map(len, one.stdout.splitlines())) <= 80) == (True, True)
    assert "Operators by" not in one.stdout
    assert ("Kernels by GPU time" in full.stdout, "Operators by self time" in full.stdout) == (True, True)
    assert flopwise("explain", trace, "-o", "all.txt", cwd=tmp_path).returncode == 0
    assert (tmp_path / "all.txt").read_text() == full.stdout
    many = flopwise("explain", *sorted(FIXTURES.iterdir()), "--format", "json", cwd=tmp_path)
    content = json.loads(many.stdout)
    assert (content["schema"], [t["steps"] for t in content["traces"]]) == ("flopwise.explain/1", [2, 2, 2])
    against = flopwise(
        "explain", sorted(FIXTURES.iterdir())[0], "--against", sorted(FIXTURES.iterdir())[1], cwd=tmp_path
    )
    assert (against.returncode, "saved" in against.stdout) == (0, True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"SQLite format 3\0", b"\x1f\x8b\x08", b"null"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.sqlite", "t.sqlite.gz", "t.nsys-rep"])
def test_a_file_that_is_no_trace_is_one_line(content, name, tmp_path):
    (tmp_path / name).write_bytes(content)
    done = flopwise("explain", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) <= 2
    assert done.stderr.startswith("error: ")


def test_a_scrubbed_trace_says_the_same(tmp_path):
    trace = FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"
    assert flopwise("runs", "scrub", trace, "-o", "safe.json.gz", cwd=tmp_path).returncode == 0
    said = [
        json.loads(flopwise("explain", t, "--format", "json", cwd=tmp_path).stdout) for t in (trace, "safe.json.gz")
    ]
    assert said[0]["traces"][0]["kernels"] == said[1]["traces"][0]["kernels"]


def test_a_run_without_a_trace_says_how_to_get_one(bench):
    cwd, _, _ = bench
    done = flopwise("explain", "base", cwd=cwd)
    assert (done.returncode, "flopwise profile" in done.stderr) == (2, True)


def test_help_imports_nothing_heavy():
    heavy = ("torch", "numpy", "polars", "rich", "msgspec", "flopwise.spec")
    code = f"""
import sys
try:
    from flopwise.cli.main import main
    main(["--help"])
finally:
    print([module for module in {heavy} if module in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb, tmp_path):
    done = flopwise(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    shown = done.stdout.splitlines()
    example = next(i for i, line in enumerate(shown) if f"Example: flopwise {verb}" in line)
    assert shown[example + 1].startswith("    ")  # what it prints
    assert shown[example + 1].strip()


@pytest.mark.slow
def test_without_torch_runs_are_read_and_bench_says_what_to_install(bench):
    """A laptop without torch: `sitecustomize` hides it."""
    cwd, _, _ = bench
    hidden = cwd / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ImportError('no torch here')")
    assert flopwise_process("runs", "show", "base", cwd=cwd, PYTHONPATH=str(hidden)).returncode == 0
    assert flopwise_process("doctor", cwd=cwd, PYTHONPATH=str(hidden)).returncode == 0
    done = flopwise_process("bench", "tiny", cwd=cwd, PYTHONPATH=str(hidden))
    assert done.returncode == 2
    assert "flopwise[torch]" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_ctrl_c_while_the_program_is_being_loaded_is_quiet(monkeypatch, capsys):
    class Interrupts:
        def find_spec(self, name, path=None, target=None):
            if name == "flopwise.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "flopwise.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        flopwise_main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")
