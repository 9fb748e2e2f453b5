import json
import math

import msgspec
import pytest

from flopwise.advice.decisions import KEPT, checked, decide, describe, disagreement
from flopwise.analysis.comparison import compare_samples
from flopwise.errors import FlopwiseError
from flopwise.records.comparison import INCONCLUSIVE
from flopwise.records.events import AgreementResult
from flopwise.records.run import Agreement, Difference
from flopwise.records.tuning import Attempt, Begun, Decision, Ended, Row, Tuning
from flopwise.spec.workload import workload
from flopwise.store.rows import append_row, read_rows

BEFORE = [100.0 + i % 3 for i in range(30)]
GIB = 2**30


def against(factor):
    return compare_samples(BEFORE, [factor * x for x in BEFORE], paired=True)


def test_levers_changed_together_are_kept_together():
    start = workload("tiny", rope="triton")
    one = Attempt(lever="compile", value="blocks", before="off", status="ok", kept=True, also={"rope": "eager"})
    assert one.name == "compile = blocks, rope = eager"
    recipe = Tuning(run="", begun=Begun(workload=start, step_ns=1.0), attempts=(one,), ended=None).best.recipe
    assert (recipe.compile, recipe.rope) == ("blocks", "eager")


RATIO = {"low": 1.0, "high": 1.0, "verdict": "", "reason": "", "n_a": 1, "n_b": 1, "paired": True, "drift": 0.0}


@pytest.mark.parametrize(
    "asked",
    [
        {"lever": "__class__"},
        {"also": {"no": "1"}},
        {"lever": "checkpoint", "value": "x"},
        {"lever": "checkpoint", "value": "9" * 5000},
        {"comparison": RATIO | {"ratio": 1e308}},
        {"comparison": RATIO | {"ratio": -1.0}},
    ],
)
def test_a_file_that_names_other_levers_is_refused(tmp_path, asked):
    row = {"row": "attempt", "lever": "graph", "value": "on", "before": "off", "status": "ok"} | asked
    (tmp_path / "tuning.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(FlopwiseError, match="not readable"):
        read_rows(tmp_path / "tuning.jsonl", Row, "tuning")


def kept(*args, **options):
    return decide(*args, **options).key in KEPT


def test_what_is_faster_is_kept_and_what_is_slower_is_not():
    assert decide(against(0.8), None, None, None).key == "faster"
    assert decide(against(1.2), 10 * GIB, GIB, None).key == "slower"


def test_as_fast_and_smaller_is_kept():
    assert decide(against(1.0), 10 * GIB, 9 * GIB, None).key == "smaller"
    assert decide(against(1.0), 10 * GIB, 10 * GIB, None).key == "no difference shown"


def test_what_takes_the_hosts_pace_away_stays_if_it_is_not_slower():
    assert decide(against(1.0), GIB, GIB, None, steadier=True).key == "steadier"
    assert not kept(against(1.0), GIB, GIB, None)
    assert kept(against(1.001), GIB, GIB, None, steadier=True)  # no difference, shown
    unsure = compare_samples(BEFORE[:6], [70.0, 140.0, 90.0, 130.0, 101.0, 104.0], paired=True)
    assert unsure.verdict == INCONCLUSIVE
    assert unsure.ratio > 1
    assert not kept(unsure, GIB, GIB, None, steadier=True)
    assert not kept(against(1.0), GIB, 12 * GIB, 11 * GIB, steadier=True)


def test_a_memory_limit_rules():
    assert decide(against(0.5), 10 * GIB, 12 * GIB, 11 * GIB).key == "over limit"
    assert decide(against(1.5), 12 * GIB, 8 * GIB, 11 * GIB).key == "under limit"
    assert kept(against(0.5), 8 * GIB, 9 * GIB, 11 * GIB)
    assert not kept(against(1.5), 50 * GIB, 50 * GIB - 1, 40 * GIB)  # nothing gained, and slower
    assert kept(against(1.5), 50 * GIB, 45 * GIB, 40 * GIB)  # on the way


def off(kind="loss", error=1.0, rounding=0.001, **fields):
    return Difference(kind=kind, error=error, rounding=rounding, **({"step": 1} | fields))


def agreement(*differences, **fields):
    return Agreement(losses=(1.0,), reference_losses=(1.0,), differences=differences, **fields)


def wrong(*differences):
    decision = disagreement(agreement(*differences))
    return decision.key if decision is not None else ""


def test_rounding_is_allowed_and_errors_are_not():
    assert wrong(off("loss", 0.004), off("gradient", 0.0019)) == ""
    assert wrong(off("loss", 0.006)) == "wrong loss"
    assert wrong(off("gradient", 0.0021)) == "wrong gradients"
    assert wrong(off("update", 0.004, measure="decay")) == "wrong updates"
    assert wrong(off("gradient", math.nan)) == "wrong gradients"
    assert disagreement(None) is None


def test_later_steps_amplify_rounding_and_count_less():
    assert wrong(off("loss", 0.006, step=2)) == ""
    assert wrong(off("loss", 0.011, step=2)) == "wrong loss"
    first, later = off("gradient", 0.003), off("loss", 0.5, step=4)
    assert wrong(later, first) == "wrong gradients"  # the first step's, though it is less off


def test_the_weight_is_named_and_the_direction():
    one = describe(disagreement(agreement(off("gradient", 0.25, measure="weight", where="head.weight"))))
    assert one == "the gradients of head.weight are 25 % off the reference (0.3 % allowed)"
    decay = describe(disagreement(agreement(off("update", 0.25, measure="decay", step=2))))
    assert decay == "the updates of the weights (weight decay) of step 2 are 25 % off the reference (0.6 % allowed)"


def test_a_batch_learnt_by_heart_is_measured_by_its_first_loss():
    learnt = Agreement(losses=(9.3, 0.010), reference_losses=(9.3, 0.009))
    assert learnt.loss_error == pytest.approx(0.001 / 0.93)
    earlier = Agreement(losses=(0.010, 0.034), reference_losses=(0.009, 0.034), first_loss=9.3)  # as stored before
    assert earlier.loss_error == pytest.approx(0.001 / 0.93)


FASTER = Decision(key="faster")


@pytest.mark.parametrize(
    ("agreed", "varies", "key", "check"),
    [
        (AgreementResult(agreement=agreement(off(error=0.0))), False, "faster", ""),
        (AgreementResult(agreement=agreement(off())), False, "wrong loss", ""),  # however fast
        (AgreementResult(agreement=agreement(off())), True, "faster", "random"),
        (AgreementResult(agreement=agreement(off(error=0.0), same_draws=False)), False, "faster", "other draws"),
        (AgreementResult(agreement=agreement(off(), same_draws=False)), False, "wrong loss", ""),
        (AgreementResult(failed="no such file"), False, "check failed", ""),
        (AgreementResult(), False, "faster", "unchecked"),
    ],
)
def test_a_wrong_result_is_not_kept_however_fast(agreed, varies, key, check):
    found = checked(FASTER, agreed, varies)
    assert (found.key, found.check) == (key, check)
    slower = Decision(key="slower")
    assert checked(slower, agreed, varies) == slower


def test_every_decision_is_a_sentence():
    off = {"error": 0.25, "allowed": 0.02, "saved_share": 0.1}
    keys = (
        "faster",
        "smaller",
        "under limit",
        "steadier",
        "over limit",
        "slower",
        "no difference shown",
        "inconclusive",
    )
    for key in (*keys, "wrong loss", "wrong gradients", "wrong updates", "check failed", "not run"):
        assert describe(Decision(key=key, values=off, detail="too few samples"))
    assert describe(Decision(key="smaller", values=off)) == "10% less memory, and not shown to be slower"
    assert "nan times off" in describe(Decision(key="wrong loss", values={"error": math.nan, "allowed": 0.02}))
    unchecked = describe(msgspec.structs.replace(FASTER, check="unchecked"))
    assert unchecked == "faster; losses and gradients not checked"


def test_a_decision_with_a_nan_is_read_back():
    row = attempt(decision=Decision(key="wrong loss", values={"error": math.nan, "allowed": 0.02}))
    read = msgspec.json.decode(msgspec.json.encode(row), type=Row)
    assert describe(read.decision) == describe(row.decision)


def attempt(**fields):
    given = {"lever": "graph", "value": "on", "before": "off", "status": "ok", "before_ns": 20e6, "after_ns": 10e6}
    return Attempt(**given | fields)


def test_a_prediction_is_close_within_a_fifth_or_a_millisecond():
    assert attempt(predicted_ns=8.1e6).close is True
    assert attempt(predicted_ns=7.9e6).close is False
    assert attempt(after_ns=19.5e6, predicted_ns=1.4e6).close is True
    assert attempt(predicted_ns=None).close is None
    assert attempt(after_ns=None, predicted_ns=1.0).close is None


def test_what_was_saved_is_by_the_ratio_that_was_judged():
    pairs = compare_samples([100.0, 200.0] * 10, [90.0, 180.0] * 10, paired=True)
    assert attempt(before_ns=150.0, after_ns=140.0, comparison=pairs).saved_ns == pytest.approx(15.0)
    assert attempt(before_ns=150.0, after_ns=140.0).saved_ns == 10.0


def test_too_few_samples_are_the_reason_that_is_told():
    found = decide(compare_samples([100.0], [25.0] * 3, paired=True), None, None, None)
    assert found.key == "inconclusive"
    assert "inconclusive: too few samples: 1 and 3" in describe(found)


@pytest.mark.parametrize("field", ["before_ns", "after_bytes"])
@pytest.mark.parametrize("value", [-5, 10**400])
def test_numbers_that_no_step_has_are_refused(tmp_path, field, value):
    path = tmp_path / "tuning.jsonl"
    row = json.loads(msgspec.json.encode(attempt())) | {field: value}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(FlopwiseError, match="not readable"):
        read_rows(path, Row, "tuning")


def test_rows_are_read_back_and_a_torn_one_is_left_out(tmp_path):
    start = workload("tiny")
    path = tmp_path / "tuning.jsonl"
    rows = [
        Begun(workload=start, step_ns=2e7),
        attempt(kept=True),
        Ended(workload=start, step_ns=1e7, stopped="nothing left to try"),
    ]
    for row in rows:
        append_row(path, row)
    assert read_rows(path, Row, "tuning").rows == rows
    path.write_bytes(path.read_bytes() + b'{"row":"att')
    assert read_rows(path, Row, "tuning").rows == rows


def test_what_was_kept_is_the_best_even_without_an_end():
    tuning = Tuning(
        run="x",
        begun=Begun(workload=workload("tiny"), step_ns=2e7),
        attempts=(attempt(kept=True), attempt(lever="loss", value="fused")),
        ended=None,
    )
    assert tuning.best.recipe.changed() == {"graph": "on"}


@pytest.mark.parametrize("step_ns", [0.0, 5e-324, 3e16])
def test_absurd_times_are_no_error(step_ns):
    before = Begun(workload=workload("tiny"), step_ns=step_ns)
    found = Tuning(run="", begun=before, attempts=(), ended=Ended(workload=before.workload, step_ns=5e-324, stopped=""))
    assert found.times_faster == 1.0
    kept = Attempt(lever="graph", value="on", before="off", status="ok", before_ns=step_ns, after_ns=5e-324, kept=True)
    assert math.isfinite(msgspec.structs.replace(found, attempts=(kept,)).times_faster)
