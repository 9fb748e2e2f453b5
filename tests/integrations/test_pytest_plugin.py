"""The pytest plugin: a baseline is stored, compared with, and fails what has become slower; another machine's is not."""

import json

import pytest

import flopwise.api.bench
import flopwise.api.compare  # numpy, which these two bring, can be loaded but once in a process
from flopwise.records.run import STEP, PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run, StoredRun

pytest_plugins = ["pytester"]

WORDS = ("-p", "flopwise.integrations.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist")
OWN_STEP = """
def factory(device):
    return lambda: None
"""
TEST = """
def test_step(flopwise):
    flopwise.bench("py:step:factory", device="cpu", samples=8, warmup=1)
"""


def test_a_baseline_is_stored_compared_with_and_only_on_its_own_machine(pytester, monkeypatch):
    """With what is measured for real; which is faster is not asked: see the made-up samples below."""
    pytester.makepyfile(step=OWN_STEP)
    pytester.makepyfile(test_it=TEST)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    first = pytester.runpytest_inprocess(*WORDS)
    first.assert_outcomes(passed=1, warnings=1)
    first.stdout.fnmatch_lines(["*has no baseline: pytest --flopwise-update stores one*"])
    pytester.runpytest_inprocess(*WORDS, "--flopwise-update").assert_outcomes(passed=1)
    (points,) = (pytester.path / ".flopwise" / "baseline").glob("test_step-1-*/points.jsonl")
    again = pytester.runpytest_inprocess(*WORDS, "--flopwise-fail-above", "1000%")
    assert "times its baseline" in again.stdout.str()
    row = json.loads(points.read_text())
    row["environment"]["cpu"] = "Z80"
    points.write_text(json.dumps(row) + "\n")
    other = pytester.runpytest_inprocess(*WORDS)
    other.assert_outcomes(passed=1, warnings=1)
    other.stdout.fnmatch_lines(["*not compared: *A Z80; B *"])


def test_what_cannot_be_measured_fails_with_its_reason_and_hint(pytester):
    pytester.makepyfile(
        """
        def test_module(flopwise):
            flopwise.bench("py:no_such_module:step", device="cpu")

        def test_value(flopwise):
            flopwise.bench("tiny", device="cpu", precision="bf17")

        def test_option(flopwise):
            flopwise.bench("tiny", device="cpu", sampels=3)
        """
    )
    result = pytester.runpytest_inprocess(*WORDS)
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["*no_such_module*", "hint: *"])
    result.stdout.fnmatch_lines(["precision = 'bf17' is not allowed", "hint: *bf16*"])
    result.stdout.fnmatch_lines(["*'sampels'*", "hint: *"])
    assert "pytest_plugin.py" not in result.stdout.str()  # no traceback through flopwise
    assert "During handling" not in result.stdout.str()


def test_a_percentage_that_is_none_is_wrong_usage(pytester):
    pytester.makepyfile(TEST)
    result = pytester.runpytest_subprocess(*WORDS, "--flopwise-fail-above", "ten")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --flopwise-fail-above: 'ten' is not a percentage", "hint: write it as 3% or 0.03"]
    )
    assert "Traceback" not in result.stderr.str()


@pytest.fixture
def made(pytester, monkeypatch):
    """Run a test of one line with made-up samples, in this process: `bench` itself is tested above."""

    def bench(target, *, runs, command, samples=(), status="ok", **options):
        trial = Trial(workload=workload(target, **options), sampling=Sampling(), device="cpu")
        step = PhaseTimes(phase=STEP, wall_ns=samples)
        with Run.create(runs, "bench", target, command, [trial]) as run:
            run.append(Point(key=trial.key(), trial=trial, status=status, phases=(step,)))
        return StoredRun.load(run.path)

    def run(call, *words):
        pytester.makepyfile(test_it=f"def test_step(flopwise):\n    flopwise.bench({call})")
        result = pytester.runpytest_inprocess(*WORDS, *words, no_reraise_ctrlc=True)
        result.stdout.no_re_match_line(r".*pytest_plugin\.py:\d+: in ")  # no traceback through flopwise
        assert "During handling" not in result.stdout.str()
        return result

    monkeypatch.setattr(flopwise.api.bench, "bench", bench)
    return run


SLOW, FAST, WIDE = (
    f"samples=({', '.join(map(str, range(*some)))})" for some in ((9000, 9100), (900, 1000), (500, 1500, 200))
)


def test_slower_than_the_baseline_fails(made, pytester):
    made(f'"tiny", {FAST}', "--flopwise-update", "--flopwise-baseline", "kept").assert_outcomes(passed=1)
    assert len(list((pytester.path / "kept").glob("test_step-1-*/points.jsonl"))) == 1
    slow = made(f'"tiny", {SLOW}', "--flopwise-baseline", "kept", "--flopwise-fail-above", "20%")
    slow.assert_outcomes(failed=1)
    slow.stdout.fnmatch_lines(["*slower, *times its baseline*allowed: 20.0 % more*"])
    made(f'"tiny", {SLOW}', "--flopwise-baseline", "kept", "--flopwise-fail-above", "1000%").assert_outcomes(passed=1)
    made(f'"tiny", {FAST}', "--flopwise-baseline", "kept").assert_outcomes(passed=1)


def test_another_workloads_baseline_fails_until_it_is_stored_anew(made):
    made(f'"py:step:factory", {SLOW}', "--flopwise-update").assert_outcomes(passed=1)
    for now in (FAST, SLOW):
        other = made(f'"op:softmax", {now}')
        other.assert_outcomes(failed=1)
        other.stdout.fnmatch_lines(
            ["the baseline is of another workload (py:step:factory; this is op:softmax *): pytest --flopwise-update*"]
        )
        other.stdout.no_fnmatch_line("*times its baseline*")
    made(f'"op:softmax", {FAST}', "--flopwise-update").assert_outcomes(passed=1)
    made(f'"op:softmax", {FAST}').assert_outcomes(passed=1)
    made(f'"op:softmax", set={{"cols": 64}}, {FAST}').assert_outcomes(failed=1)


def test_other_levers_are_compared_and_named(made):
    made(f'"op:softmax", {SLOW}', "--flopwise-update").assert_outcomes(passed=1)
    result = made(f'"op:softmax", precision="bf16", {FAST}')
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*precision=bf16: faster, *times its baseline*, which was op:softmax rows=4096 cols=4096 forward"]
    )


def test_an_inconclusive_result_is_said_once(made):
    made(f'"tiny", {WIDE}', "--flopwise-update").assert_outcomes(passed=1)
    result = made('"tiny", samples=(1400, 600, 1000)')
    result.assert_outcomes(passed=1, warnings=1)
    assert len([line for line in result.outlines if line.startswith("test_it.py::test_step: tiny")]) == 1
    result.stdout.fnmatch_lines(["*test_it.py:2: FlopwiseWarning: tiny *: inconclusive, *"])


def test_ctrl_c_stores_no_baseline(made, pytester):
    result = made(f'"tiny", status="interrupted", {FAST}', "--flopwise-update")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not (pytester.path / ".flopwise").exists()


def test_a_damaged_baseline_is_one_line(made, pytester):
    made(f'"tiny", {FAST}', "--flopwise-update").assert_outcomes(passed=1)
    for name in ("points.jsonl", "run.json"):
        (file,) = (pytester.path / ".flopwise" / "baseline").glob(f"*/{name}")
        file.write_text(file.read_text()[:40])
        result = made(f'"tiny", {FAST}')
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["the baseline * cannot be read: *", "hint: pytest --flopwise-update stores a new one"]
        )


def test_a_baseline_that_cannot_be_stored_is_one_line(made, pytester):
    (pytester.path / "taken").write_text("a file")
    result = made(f'"tiny", {FAST}', "--flopwise-update", "--flopwise-baseline", "taken")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["cannot store the baseline in *taken*", "hint: name a folder with --flopwise-baseline"]
    )
