"""What a user is shown of a tuning."""

import re
from pathlib import Path

import msgspec
import pytest

from flopwise.advice.decisions import describe, describe_attempt
from flopwise.analysis.comparison import compare_samples
from flopwise.records.run import Agreement, Ran, Seen
from flopwise.records.tuning import Attempt, Begun, Decision, Ended, Tuning
from flopwise.render.tune_screen import tune_screen
from flopwise.render.tune_view import tune_view, verdict
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload
from flopwise.store import StoredRun
from flopwise.store.tuning import read_tuning

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11-tune-final"


def test_the_turns_speak_where_the_machine_has_drifted():
    before = Begun(workload=workload("tiny"), step_ns=44e6)
    ratio = compare_samples([12.0] * 6, [8.4] * 6, paired=True)
    times = {"before_ns": 12e6, "after_ns": 8.4e6}
    kept = Attempt(lever="norm", value="torch", before="eager", status="ok", comparison=ratio, kept=True, **times)
    found = Tuning(
        run="x", begun=before, attempts=(kept,), ended=Ended(workload=before.workload, step_ns=8.4e6, stopped="")
    )
    assert "12.0 ms → 8.40 ms, 1.43x" in verdict(found)
    assert any("alone, before all others, the first step took 44.0 ms" in note for note in tune_view(found)[0][0].notes)
    steady = msgspec.structs.replace(found, begun=msgspec.structs.replace(before, step_ns=12e6))
    assert not any("alone" in note or "speed" in note for note in tune_view(steady)[0][0].notes)
    drifted = msgspec.structs.replace(found, ended=msgspec.structs.replace(found.ended, step_ns=6e6))
    assert "12.0 ms → 6.00 ms, 2.00x" in verdict(drifted)
    assert any("all are 1.43x" in note for note in tune_view(drifted)[0][0].notes)
    nothing = msgspec.structs.replace(found, attempts=(msgspec.structs.replace(kept, kept=False),))
    assert "12.0 ms → 12.0 ms, 1.00x" in verdict(nothing)
    assert tune_view(found)[1]["times_faster"] == pytest.approx(12 / 8.4)


def test_a_waterfall_of_another_measurement_says_so():
    """On an H200, large at 4 × 512 took 28.4 ms when it was measured and 32.0 when it was traced; small 62.7 and 61.4."""
    notes = tune_view(read_tuning(StoredRun.load(RESULTS / "large-4x512")))[0][0].notes
    assert [note for note in notes if "the waterfall" in note] == [
        "the waterfall after is of a step of 32.0 ms, the time when it was traced"
    ]
    notes = tune_view(read_tuning(StoredRun.load(RESULTS / "small-4x512")))[0][0].notes
    assert any("the waterfall before is of a step of 61.4 ms" in note for note in notes)
    notes = tune_view(read_tuning(StoredRun.load(RESULTS / "2.7B-16x1024")))[0][0].notes
    assert not any("the waterfall" in note for note in notes)


def tuning(*attempts, start=None, **levers):
    """One that kept these attempts."""
    start = start or workload("tiny", norm="eager")
    recipe = msgspec.structs.replace(start.recipe, **levers)
    ended = Ended(
        workload=msgspec.structs.replace(start, recipe=recipe),
        step_ns=8e6,
        stopped="nothing left to try",
        notes=("hot",),
    )
    return Tuning(
        run="x", begun=Begun(workload=start, step_ns=12e6, notes=("on the CPU",)), attempts=attempts, ended=ended
    )


def attempt(lever, value, **fields):
    usual = {"before_ns": 12e6, "after_ns": 8e6, "status": "ok", "kept": True}
    return Attempt(lever=lever, value=value, before="eager", **usual | fields)


def test_every_line_of_pytorch_stands_beside_its_lever():
    found = tuning(attempt("norm", "torch"), attempt("loss", "chunked"), norm="torch", loss="chunked")
    tables, document = tune_view(found)
    rows = {row["file"].split()[0].strip("#"): row for row in tables[-1].rows if row["file"].startswith("loss")}
    assert "cross_entropy" in rows["loss"]["code"]
    (norm,) = (row for row in tables[-1].rows if row["code"] and "rms_norm" in row["code"])
    assert norm["file"] == "# norm: the default"
    assert document["recipe_toml"] == 'loss = "chunked"'


def test_notes_tell_what_was_not_checked_and_how_it_ended():
    notes = tune_view(tuning(attempt("norm", "torch"), norm="torch"))[0][0].notes
    assert {"on the CPU", "hot"} <= set(notes)
    assert any("may be wrong" in note for note in notes)
    assert any("nothing left to try" in note for note in notes)
    right = Agreement(losses=(1.0,), reference_losses=(1.0,), gradient_error=0.0)
    notes = tune_view(tuning(attempt("norm", "torch", agreement=right), norm="torch"))[0][0].notes
    assert not any("may be wrong" in note for note in notes)


SEEN = Seen(flops={"fp32": 10**12}, useful_flops=10**12, tokens=1024)


def test_flops_and_tokens_are_those_of_the_first_step_and_the_peak_that_of_the_precision_kept():
    start = workload("py:my.steps:make")
    found = tuning(attempt("precision", "bf16"), attempt("compile", "default"), start=start, precision="bf16")
    begun = msgspec.structs.replace(found.begun, ran=Ran(device="cuda:0", seen=SEEN), gpu="NVIDIA H200")
    tables, document = tune_view(msgspec.structs.replace(found, begun=begun))
    before, after = 1e12 / 12e-3 / gpu("h200").peak("fp32"), 1e12 / 8e-3 / gpu("h200").peak("bf16")
    assert document["rates_before"] == {"mfu": pytest.approx(before), "tokens_per_s": pytest.approx(1024 / 12e-3)}
    assert document["rates_after"] == {"mfu": pytest.approx(after), "tokens_per_s": pytest.approx(1024 / 8e-3)}
    assert [row["mfu"] for row in tables[0].rows] == [pytest.approx(after)] * 2
    said = f"MFU {100 * before:.1f} % of 66.9 TFLOP/s fp32 → {100 * after:.1f} % of 989 TFLOP/s bf16"
    assert f"{said}; 85.3K → 128K tokens/s" in tables[0].notes


def test_a_tuning_of_an_earlier_version_has_no_rates_of_a_users_step():
    document = tune_view(tuning(attempt("compile", "default"), start=workload("py:my.steps:make")))[1]
    assert document["rates_after"] == {"mfu": None, "tokens_per_s": None}


@pytest.mark.parametrize("ratio", [0.933, 1.0, 1.2])
@pytest.mark.parametrize("drift", [0.9, 1.0, 1.115])
def test_the_times_of_an_attempt_agree_with_its_ratio(ratio, drift):
    """A past bug: '475 ms → 494 ms … 6.7 % less was seen'. The law: the second time over the first is the ratio judged."""
    found = msgspec.structs.replace(compare_samples([(100, 101, 102)], [(100, 101, 102)], paired=False), ratio=ratio)
    one = attempt("optimizer", "fused", before_ns=475e6, after_ns=475e6 * ratio * drift, comparison=found, why="said")
    before, after = (float(word) for word in re.findall(r"([\d.]+) ms", describe_attempt(one)))
    assert after / before == pytest.approx(ratio, abs=0.005)


def test_a_tuning_that_kept_nothing_says_why_of_all_and_is_not_cut():
    long = Decision(key="inconclusive", detail="same against same would differ as much; 6.0 % less was seen")
    tried = [attempt("optimizer", "fused", decision=long, why=describe(long), kept=False) for _ in range(9)]
    tried += [attempt("compile", "default", status="unsupported", kept=False, why="a compiler is missing " * 9)]
    for some, counts in ((tried, "9 inconclusive, 1 unsupported"), (tried[-1:], "kept: 1 unsupported. Why: --full.")):
        shown = str(msgspec.structs.replace(tuning(*some), ended=None))
        assert counts in " ".join(shown.split())
        assert "…" not in shown


def test_a_bundle_says_what_each_lever_is_predicted_to_be_worth():
    bundle = attempt("graph", "on", also={"optimizer": "fused"}, worth_ns={"optimizer": 1e6, "graph": 2.5e6})
    worth = "predicted to be lost without one of them: graph 2.50 ms, optimizer 1.00 ms"
    found = tuning(bundle, graph="on", optimizer="fused")
    assert any(worth in note for note in tune_view(found).tables[0].notes)
    assert any(worth in words for words in tune_screen(found).paragraphs)
