"""tune with real processes, on the CPU. Its choices are tested without any in tests/advice/test_tuner.py."""

import pytest

from flopwise.advice import moves
from flopwise.api.tune import tune
from flopwise.capture import stopping
from flopwise.errors import FlopwiseError
from flopwise.render.tune_view import tune_view, verdict
from flopwise.store import StoredRun, list_runs
from flopwise.store.tuning import read_tuning


@pytest.fixture
def few_levers(monkeypatch):
    def choose(**levers):
        monkeypatch.setattr(moves, "TRIED", {lever: tuple(values) for lever, values in levers.items()})
        monkeypatch.setattr(moves, "GPU_ONLY", {})

    return choose


def run(tmp_path, **options):
    return tune("tiny", batch=1, context=32, device="cpu", seconds=0.1, budget=300.0, runs=tmp_path, **options)


@pytest.mark.slow
def test_levers_are_rows_and_one_that_cannot_run_is_one_too(tmp_path, few_levers, monkeypatch):
    monkeypatch.setattr(stopping, "MUCH_SLOWER_ROUNDS", 10**9)  # on a busy machine two rounds may say anything
    few_levers(attention=("sdpa",), graph=("on",))
    found = run(tmp_path, attention="naive", norm="eager")
    attempts = {attempt.lever: attempt for attempt in found.attempts}
    assert (attempts["graph"].status, attempts["graph"].decision.key) == ("unsupported", "not run")
    assert "NVIDIA" in attempts["graph"].why
    sdpa = attempts["attention"]
    assert sdpa.status == "ok"
    assert sdpa.comparison.paired
    assert min(sdpa.comparison.n_a, sdpa.comparison.n_b) >= 6
    assert sdpa.agreement.gradient_error < 1e-4
    assert found.begun.agreement.loss_error < 1e-5
    assert found.ended.stopped == "nothing left to try"
    points = StoredRun.load(tmp_path / found.run).points
    assert {point.trial.group for point in points} >= {"start", "best before attempt 1", "attempt 1", "attempt 2"}
    assert read_tuning(found.run, tmp_path) == found
    assert verdict(found) in tune_view(found)[0][0].title


@pytest.mark.slow
def test_where_nothing_helps_the_step_stays_as_it_was(tmp_path, few_levers):
    few_levers()
    found = run(tmp_path, precision="bf16", keep_exact=True, memory_limit=2**30)
    assert (found.attempts, found.times_faster) == ((), 1.0)
    assert found.best == found.begun.workload
    assert found.begun.note_keys == ("no_memory_limit", "starts_rounded", "no_trace")
    (whole,) = list_runs(tmp_path)
    assert whole.complete
    rows = tmp_path / found.run / "tuning.jsonl"
    rows.write_bytes(b"\n".join(rows.read_bytes().split(b"\n")[:-2]) + b"\n")
    assert not list_runs(tmp_path)[0].complete  # without its end


def test_what_cannot_be_tuned_is_refused():
    with pytest.raises(FlopwiseError, match="nothing to tune"):
        tune("op:gelu", device="cpu")
    with pytest.raises(FlopwiseError, match=r"no step fits a memory limit of 1\.00 KiB"):
        tune("tiny", device="cpu", memory_limit=1024)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allow": ["fp8"]}, "fp8 needs a GPU of compute capability 8.9; this device is a CPU"),
        ({"allow": ["fp8"], "keep_exact": True}, "--keep-exact does not go with --allow fp8"),
        ({"allow": ["fp4"]}, "allow = 'fp4' is not allowed"),
        ({"allow": "fp8"}, "allow = 'fp8' is not allowed"),
        ({"allow": None}, "allow = None is not allowed"),
    ],
)
def test_what_is_allowed_by_name_must_be_there(tmp_path, options, said):
    with pytest.raises(FlopwiseError, match=said):
        run(tmp_path, **options)
    assert list_runs(tmp_path) == []
