"""tune, whole, on the CPU: a few levers of a tiny model; what it keeps is decided by a stand-in for the clock."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from flopwise.advice.facts import Facts
from flopwise.advice.moves import Move, moves
from flopwise.analysis.comparison import compare_samples
from flopwise.api import tune as module
from flopwise.api.tune import tune
from flopwise.api.tune_facts import Outlook
from flopwise.capture import turns
from flopwise.errors import FlopwiseError
from flopwise.predict.fit import peak_of
from flopwise.records.events import AgreementResult
from flopwise.records.run import OOM, PhaseTimes, Point, Telemetry
from flopwise.records.tuning import Attempt, Begun, Ended, Tuning
from flopwise.render.tune_view import tune_view, verdict
from flopwise.spec.gpu import gpu
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import StoredRun, list_runs
from flopwise.store.tuning import read_tuning

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11-tune-all"


@pytest.fixture(autouse=True)
def never_given_up(monkeypatch):
    """On a busy machine a step may take twice as long in two rounds, and be given up for it."""
    monkeypatch.setattr(turns, "HOPELESS_ROUNDS", 10**9)
    monkeypatch.setattr(turns, "PLAIN_ROUNDS", 10**9)


@pytest.fixture
def few_levers(monkeypatch):
    def choose(**levers):
        import flopwise.advice.moves as moves

        monkeypatch.setattr(moves, "TRIED", {lever: tuple(values) for lever, values in levers.items()})

    return choose


def run(tmp_path, **options):
    return tune("tiny", batch=1, device="cpu", seconds=0.2, budget=120.0, runs=tmp_path, **options)


def test_every_lever_is_tried_once_and_is_a_row(tmp_path, few_levers):
    few_levers(attention=("sdpa",), norm=("torch",), loss=("chunked",))
    found = run(tmp_path, attention="naive", norm="eager")
    assert {(a.lever, a.value) for a in found.attempts} == {
        ("attention", "sdpa"),
        ("norm", "torch"),
        ("loss", "chunked"),
    }
    for attempt in found.attempts:
        assert attempt.status == "ok"
        assert attempt.comparison.paired
        assert attempt.before_ns > 0
        assert not attempt.kept or attempt.agreement.gradient_error < 1e-4
    assert found.ended.stopped == "nothing left to try"
    assert found.begun.agreement.loss_error < 1e-5  # by hand, but for the activation
    assert read_tuning(found.run, tmp_path) == found
    tables, document = tune_view(found)
    assert verdict(found) in tables[0].title
    assert json.loads(json.dumps(document["recipe"])) == found.best.recipe.changed()


def test_what_was_beaten_is_not_tried_again(tmp_path, few_levers, monkeypatch):
    """A lever and its way back: once the first is kept, the second would be the step that it beat."""
    few_levers(loss=("chunked", "full"))
    monkeypatch.setattr(
        module, "compare_samples", lambda a, b, paired: compare_samples([2.0] * 6, [1.0] * 6, paired=True)
    )
    found = run(tmp_path)
    assert [(a.value, a.kept) for a in found.attempts] == [("chunked", True)]


def test_what_nobody_can_predict_is_tried_the_quickest_first():
    """On the CPU there are no ceilings; a short budget is not to be spent on the compiler alone."""
    chosen = Outlook(Facts()).choose(moves(workload("tiny"), on_gpu=False), 0.0)
    assert chosen.workload.recipe.compile == "off"


def test_a_wrong_result_is_not_kept_however_fast(tmp_path, few_levers, monkeypatch):
    few_levers(attention=("sdpa",))
    monkeypatch.setattr(module, "decide", lambda *_, **__: (True, "faster"))
    monkeypatch.setattr(module, "wrong", lambda agreement, precision: "the loss is 25 % off" if agreement else "")
    found = run(tmp_path, attention="naive")
    assert [(a.kept, a.why) for a in found.attempts] == [(False, "the loss is 25 % off")]
    assert found.best.recipe == found.begun.workload.recipe


def test_what_cannot_run_is_a_row_and_the_rest_goes_on(tmp_path, few_levers, monkeypatch):
    few_levers(graph=("on",), loss=("chunked",))
    monkeypatch.setattr("flopwise.advice.moves.GPU_ONLY", {})
    found = run(tmp_path)
    told = {a.lever: a for a in found.attempts}
    assert told["graph"].status == "unsupported"
    assert "NVIDIA" in told["graph"].why
    assert told["loss"].status == "ok"


def test_the_budget_ends_it(tmp_path, few_levers, monkeypatch):
    few_levers(attention=("sdpa",))
    monkeypatch.setattr(module._Tuner, "seconds", 2.0)
    found = tune("tiny", batch=1, device="cpu", seconds=0.1, budget=1.0, runs=tmp_path, attention="naive")
    assert found.attempts == ()
    assert "budget" in found.ended.stopped


def test_one_operation_is_refused():
    with pytest.raises(FlopwiseError, match="nothing to tune"):
        tune("op:gelu", device="cpu")


def test_a_step_that_does_not_run_says_why(tmp_path):
    with pytest.raises(FlopwiseError, match="graph = 'on' needs an NVIDIA GPU"):
        tune(workload("tiny", graph="on"), device="cpu", runs=tmp_path)


def test_a_start_that_does_not_fit_is_begun_with_what_does(tmp_path, few_levers, monkeypatch):
    few_levers(attention=("sdpa",))
    start = workload("tiny", batch=1, context=256, attention="naive")
    fits = peak_of(msgspec.structs.replace(start, recipe=Recipe()), gpu("cpu"))
    assert fits < 0.95 * peak_of(start, gpu("cpu"))
    measured, asked = module._Tuner._measured_alone, []

    def runs_out_at_first(tuner, chosen, trace=None):
        asked.append(chosen.recipe.changed())
        point, agreed = measured(tuner, chosen, trace)
        if len(asked) == 1:
            tuner.memory_bytes = int(fits / module.FITTING[0]) + 1
            point = msgspec.structs.replace(point, status=OOM, reason="out of memory")
        return point, agreed

    monkeypatch.setattr(module._Tuner, "_measured_alone", runs_out_at_first)
    found = tune(start, device="cpu", seconds=0.1, budget=120.0, runs=tmp_path)
    assert asked[:2] == [{"attention": "naive"}, {}]
    assert found.begun.workload.recipe.attention == "sdpa"
    assert "does not fit (out of memory): begun with attention = sdpa" in found.begun.notes[0]


def test_what_does_not_fit_beside_the_best_is_measured_alone(tmp_path, few_levers, monkeypatch):
    few_levers(attention=("sdpa",))
    asked = []

    def no_room(tuner, first, trial):
        asked.append(trial.workload.recipe.attention)
        return msgspec.structs.replace(first, status=OOM, why="out of memory")

    def with_memory(tuner, move):
        tuner.memory_bytes = 2**60
        return True

    monkeypatch.setattr(module._Tuner, "_in_turns", no_room)
    monkeypatch.setattr(module._Tuner, "_side_by_side", with_memory)
    (attempt,) = run(tmp_path, attention="naive").attempts
    assert asked == ["sdpa"]
    assert (attempt.status, attempt.comparison.paired) == ("ok", False)


def test_two_that_the_first_rounds_leave_open_take_more_once(tmp_path, few_levers, monkeypatch):
    few_levers(loss=("chunked",))
    taken, take = [], module.take_turns

    def counted(*args, **options):
        taken.append(options["fewest"])
        return take(*args, **options)

    monkeypatch.setattr(module, "take_turns", counted)
    monkeypatch.setattr(module, "undecided", lambda before, after: True)
    (attempt,) = run(tmp_path).attempts
    assert len(taken) == 2
    assert attempt.comparison.n_b >= sum(taken)


def test_what_could_not_be_checked_says_so_when_it_is_kept(tmp_path, few_levers, monkeypatch):
    few_levers(activation=("torch",))
    monkeypatch.setattr(module, "decide", lambda *_, **__: (True, "faster"))
    found = tune(
        "tiny", batch=1, context=32, phase="forward", activation="eager", device="cpu", seconds=0.1, budget=60.0,
        memory_limit=2**30, runs=tmp_path,
    )  # fmt: skip
    assert [(a.kept, a.why) for a in found.attempts] == [(True, "faster; losses and gradients not checked")]
    notes = tune_view(found)[0][0].notes
    assert any("may be wrong" in note for note in notes)
    assert any("memory limit is not looked at" in note for note in notes)


def test_the_turns_speak_where_the_machine_has_drifted():
    before = Begun(workload=workload("tiny"), step_ns=44e6)
    ratio = compare_samples([12.0] * 6, [8.4] * 6, paired=True)
    kept = Attempt(
        lever="norm", value="torch", before="eager", status="ok", before_ns=12e6, after_ns=8.4e6, comparison=ratio, kept=True
    )  # fmt: skip
    found = Tuning(
        run="x", begun=before, attempts=(kept,), ended=Ended(workload=before.workload, step_ns=8.4e6, stopped="")
    )
    assert "12.0 ms → 8.40 ms, 1.43x" in verdict(found)
    assert any("alone, before all others, the first step took 44.0 ms" in note for note in tune_view(found)[0][0].notes)
    steady = msgspec.structs.replace(found, begun=msgspec.structs.replace(before, step_ns=12e6))
    assert not any("alone" in note or "pace" in note for note in tune_view(steady)[0][0].notes)
    drifted = msgspec.structs.replace(found, ended=msgspec.structs.replace(found.ended, step_ns=6e6))
    assert "12.0 ms → 6.00 ms, 2.00x" in verdict(drifted)
    assert any("in turns with the best before it, all are 1.43x" in note for note in tune_view(drifted)[0][0].notes)
    nothing = msgspec.structs.replace(found, attempts=(msgspec.structs.replace(kept, kept=False),))
    assert "12.0 ms → 12.0 ms, 1.00x" in verdict(nothing)
    assert tune_view(found)[1]["times_faster"] == pytest.approx(12 / 8.4)


def test_a_waterfall_of_another_measurement_says_so():
    """small at 16 × 1024 on an H200: 30.2 ms when it was measured, 34.6 when it was traced."""
    notes = tune_view(read_tuning(StoredRun.load(RESULTS / "small-16x1024")))[0][0].notes
    assert any("the waterfall after is of a step of 34.6 ms" in note for note in notes)
    notes = tune_view(read_tuning(StoredRun.load(RESULTS / "2.7B-16x1024")))[0][0].notes
    assert not any("the waterfall" in note for note in notes)


def test_a_memory_limit_that_nothing_fits_is_told_in_the_users_units():
    with pytest.raises(FlopwiseError, match=r"no step fits a memory limit of 1\.00 KiB"):
        tune("tiny", device="cpu", memory_limit=1024)


def test_a_step_begun_in_half_precision_is_not_exact_and_says_so(tmp_path, few_levers):
    few_levers()
    notes = run(tmp_path, precision="bf16", keep_exact=True).begun.notes
    assert any("the step begins in bf16" in note for note in notes)


def test_a_step_that_draws_random_numbers_is_not_judged_by_them(tmp_path, few_levers, monkeypatch):
    few_levers(loss=("chunked",))
    monkeypatch.setattr(
        module, "compare_samples", lambda a, b, paired: compare_samples([2.0] * 6, [1.0] * 6, paired=True)
    )
    monkeypatch.setattr(module, "wrong", lambda agreement, precision: "the gradients are 39 % off")
    (refused,) = run(tmp_path / "a").attempts
    assert (refused.kept, refused.why) == (False, "the gradients are 39 % off")
    write = module._Tuner._write_reference

    def drawing(tuner, start):
        write(tuner, start)
        assert not tuner.draws  # the model itself draws none
        tuner.draws = True

    monkeypatch.setattr(module._Tuner, "_write_reference", drawing)
    found = run(tmp_path / "b")
    assert [(a.kept, a.why) for a in found.attempts] == [(True, f"faster; {module.DRAWS}")]
    assert any("draws random numbers" in note for note in tune_view(found)[0][0].notes)


def test_a_tuning_without_its_end_is_not_complete(tmp_path, few_levers):
    few_levers(loss=("chunked",))
    found = run(tmp_path)
    (whole,) = list_runs(tmp_path)
    assert whole.complete
    rows = tmp_path / found.run / "tuning.jsonl"
    rows.write_bytes(b"\n".join(rows.read_bytes().split(b"\n")[:-2]) + b"\n")
    assert not list_runs(tmp_path)[0].complete


def test_a_gpu_that_was_slowed_is_told_of(tmp_path, few_levers, monkeypatch):
    few_levers(loss=("chunked",))
    append = module._Tuner._append

    def hot(tuner, point):
        append(tuner, msgspec.structs.replace(point, telemetry=Telemetry(throttle=("software power cap",))))

    monkeypatch.setattr(module._Tuner, "_append", hot)
    found = run(tmp_path)
    assert "slowed (software power cap) in 3 of 3 measurements" in found.ended.notes[0]
    assert any("power cap" in note for note in tune_view(found)[0][0].notes)


def test_every_line_of_pytorch_stands_beside_its_lever(tmp_path, few_levers, monkeypatch):
    few_levers(norm=("torch",), loss=("chunked",))
    monkeypatch.setattr(module, "decide", lambda *_, **__: (True, "faster"))
    tables, document = tune_view(run(tmp_path, norm="eager"))
    rows = {row["file"].split()[0].strip("#"): row for row in tables[-1].rows if row["file"].startswith("loss")}
    assert "cross_entropy" in rows["loss"]["code"]
    (norm,) = (row for row in tables[-1].rows if row["code"] and "rms_norm" in row["code"])
    assert norm["file"] == "# norm as it is by default"
    assert document["recipe_toml"] == 'loss = "chunked"'


def test_what_no_lever_makes_fit_is_refused(tmp_path, monkeypatch):
    def runs_out(tuner, chosen, trace=None):
        tuner.memory_bytes = 1000
        trial = tuner._trial(chosen)
        return Point(trial=trial, key=trial.key(), status=OOM, reason="out of memory"), AgreementResult()

    monkeypatch.setattr(module._Tuner, "_measured_alone", runs_out)
    with pytest.raises(FlopwiseError, match="no lever makes it fit"):
        tune("tiny", device="cpu", runs=tmp_path)


@pytest.mark.parametrize(
    ("lever", "saving_ns", "together", "unseen"),
    [
        ("norm", 0.005, False, True),  # samples taken one after the other would not show it
        ("norm", 0.005, True, False),
        ("norm", 0.02, False, False),
        ("graph", 0.005, False, False),  # it steadies what comes next
        ("norm", None, False, False),  # nobody can tell
    ],
)
def test_what_promises_too_little_to_be_seen_is_not_tried(lever, saving_ns, together, unseen):
    tuner = object.__new__(module._Tuner)
    times = PhaseTimes(phase="step", wall_ns=(10**9,) * 6)
    tuner.best = Point(
        key="", trial=Trial(workload=workload("tiny"), sampling=Sampling()), status="ok", phases=(times,)
    )
    tuner.outlook = SimpleNamespace(saving_ns=lambda move: saving_ns and saving_ns * 1e9)
    tuner._side_by_side = lambda move: together
    assert tuner._unseen(Move(lever=lever, value="x", workload=workload("tiny"))) is unseen
