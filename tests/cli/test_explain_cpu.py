"""`flopwise explain` of a trace of the CPU: one target is explained; what needs GPU work is refused in one line."""

import json

import pytest

from cpu_traces import profiled, written
from flopwise.api.explain import explain
from flopwise.cli.main import main
from flopwise.render.host_screen import host_screen


@pytest.fixture
def trace(tmp_path):
    name = "aten::\x1b[31maddmm"  # a name may hold anything
    return written(tmp_path / "t.json", ("cpu_op", "aten::linear", 1, 0, 100), ("cpu_op", name, 1, 10, 90))


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["explain", *map(str, words)])
    return ended.value.code, capsys.readouterr()


def test_ops_are_shown_with_their_self_time(trace, capsys):
    code, shown = run(capsys, trace, "--full")
    assert code == 0
    assert "op-bound: ops take 100 % of the traced step" in shown.out
    assert "aten::␛[31maddmm" in shown.out
    assert "\x1b" not in shown.out
    code, shown = run(capsys, trace, "--format", "json")
    document = json.loads(shown.out)
    assert (code, document["schema"], document["trace"]["window_ns"]) == (0, "flopwise.explain-host/1", 100_000)


def test_one_screen_says_now_and_has_no_limit(trace, capsys):
    code, shown = run(capsys, trace)
    lines = shown.out.splitlines()
    assert (code, len(lines) <= 25, max(map(len, lines)) <= 80, "\x1b" in shown.out) == (0, True, True, False)
    assert "Op-bound: ops take 100 % of the traced step" in shown.out
    assert "100 µs               measured: traced" in shown.out
    assert "limit" not in shown.out


@pytest.mark.parametrize("more", [("--against", "t.json"), ("t.json", "--full"), ("-o", "waterfall.svg")])
def test_what_needs_gpu_work_is_refused(trace, capsys, monkeypatch, more):
    monkeypatch.chdir(trace.parent)
    code, shown = run(capsys, trace, *more)
    assert code == 2
    assert "has no GPU work in it" in shown.err
    assert shown.err.count("\n") == 2


def test_timings_of_a_run_without_one_step_on_the_cpu_are_refused(trace, capsys, tmp_path):
    from flopwise.store import Run

    with Run.create(tmp_path / "runs", "bench", "nothing", "", ()) as made:
        pass
    code, shown = run(capsys, trace, "--timings", made.path, "--runs", tmp_path / "runs")
    assert code == 2
    assert "has 0 points on the CPU" in shown.err


def test_the_bar_of_a_step_on_the_cpu_adds_up_and_names_data_loading(tmp_path):
    profiled(tmp_path / "t.json")
    e = explain(tmp_path / "t.json")
    parts = {part.name: part.amount for part in host_screen(e).parts}
    assert parts["data loading"] > 0
    assert sum(parts.values()) == pytest.approx(e.window_ns)
