"""The pytest plugin: a baseline is stored, compared with, and fails what has become slower; another machine's is not."""

import json

import pytest

pytest_plugins = ["pytester"]

SLEEPER = """
import os, time

class Sleeper:
    def __call__(self):
        time.sleep(float(os.environ["SLEEP"]))

def factory(device):
    return Sleeper()
"""
TEST = """
def test_step(flopwise):
    flopwise.bench("py:sleeper:factory", device="cpu", samples=8, warmup=1)
"""
WORDS = ("-p", "flopwise.pytest_plugin", "-p", "no:cacheprovider")


@pytest.fixture
def step(pytester, monkeypatch):
    """Run the test with a step that takes so many seconds."""
    pytester.makepyfile(sleeper=SLEEPER)
    pytester.makepyfile(test_it=TEST)
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")

    def run(seconds, *words):
        monkeypatch.setenv("SLEEP", str(seconds))
        return pytester.runpytest_subprocess(*WORDS, *words)

    return run


def test_slower_than_the_baseline_fails(step, pytester):
    first = step(0.01)
    first.assert_outcomes(passed=1, warnings=1)
    first.stdout.fnmatch_lines(["*has no baseline: pytest --flopwise-update stores one*"])
    step(0.01, "--flopwise-update").assert_outcomes(passed=1)
    assert len(list((pytester.path / ".flopwise" / "baseline").glob("test_step-1-*/points.jsonl"))) == 1
    slow = step(0.3, "--flopwise-fail-above", "20%")  # so much that a busy machine cannot hide it
    slow.assert_outcomes(failed=1)
    slow.stdout.fnmatch_lines(["*slower, *times its baseline*allowed: 20.0 % more*"])
    step(0.02, "--flopwise-fail-above", "900%").assert_outcomes(passed=1)
    step(0.005).assert_outcomes(passed=1)


def test_another_machines_baseline_is_not_compared(step, pytester):
    step(0.01, "--flopwise-update", "--flopwise-baseline", "kept").assert_outcomes(passed=1)
    (points,) = (pytester.path / "kept").glob("*/points.jsonl")
    row = json.loads(points.read_text())
    row["environment"]["cpu"] = "Z80"
    points.write_text(json.dumps(row) + "\n")
    other = step(0.05, "--flopwise-baseline", "kept")
    other.assert_outcomes(passed=1, warnings=1)
    other.stdout.fnmatch_lines(["*another machine (Z80*not compared*"])


def test_what_cannot_be_measured_fails_with_its_reason(pytester):
    pytester.makepyfile('def test_step(flopwise):\n    flopwise.bench("py:no_such_module:step", device="cpu")')
    result = pytester.runpytest_subprocess(*WORDS)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no_such_module*"])
