"""The tuner's choices, with made-up measurements: no process, no file, no clock."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.advice import moves as levers
from flopwise.advice import tuner
from flopwise.advice.constants import FIT_MEMORY, SPREAD_OUT, TUNE_ERROR_RATE
from flopwise.advice.facts import Facts
from flopwise.advice.gather import Inspection
from flopwise.advice.moves import Move
from flopwise.advice.predicted import peak_bytes
from flopwise.advice.tuner_actions import (
    Finish,
    Finished,
    Measured,
    MeasurePair,
    MeasureStart,
    Prove,
    ReferenceWritten,
    Setup,
    WriteReference,
)
from flopwise.capture.interleave import Contested
from flopwise.capture.stopping import DECIDED, MUCH_SLOWER
from flopwise.errors import FlopwiseError
from flopwise.records.events import AgreementResult
from flopwise.records.run import CRASH, OOM, Agreement, Difference, PhaseMemory, PhaseTimes, Point, Ran
from flopwise.records.tuning import BUDGET_SPENT, Begun, Ended
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.statistics import FEWEST

MS, GIB = 1_000_000, 2**30
RIGHT = AgreementResult(agreement=Agreement(losses=(1.0,), reference_losses=(1.0,), gradient_error=0.0))
OFF = Difference(kind="loss", step=1, error=0.25, rounding=0.002)
WRONG = AgreementResult(agreement=Agreement(losses=(1.25,), reference_losses=(1.0,), differences=(OFF,)))


def point(work, ns=10 * MS, peak=None, status="ok", reason="", n=2 * FEWEST, **fields):
    times = PhaseTimes(phase="step", wall_ns=tuple(ns + i % 3 for i in range(n)), processes=fields.pop("processes", ()))
    memory = PhaseMemory(phase="step", start_bytes=0, peak_bytes=peak or 0, end_bytes=0, reserved_bytes=0)
    trial = Trial(workload=work, sampling=Sampling())
    good = status == "ok"
    return Point(
        key=trial.key(),
        trial=trial,
        status=status,
        reason=reason,
        phases=(times,) * good,
        memory=(memory,) * bool(peak),
        **fields,
    )


class World:
    """Answers the tuner's actions; `ns` is a step's time and `peak` its memory, by its workload."""

    def __init__(self, ns=lambda work: 10 * MS, peak=lambda work: None, **answers):
        self.ns, self.peak, self.answers = ns, peak, answers
        self.asked = []

    def answer(self, action, state):
        self.asked.append(action)
        name = type(action).__name__
        if name in self.answers and (found := self.answers[name](action)) is not None:
            return found
        match action:
            case WriteReference():
                return ReferenceWritten(agreement=RIGHT.agreement)
            case MeasureStart():
                found = point(action.workload, self.ns(action.workload), self.peak(action.workload))
                return Measured(point=found, agreed=RIGHT, inspection=Inspection(facts=Facts(point=found)))
            case MeasurePair():
                work = action.workload
                return pair(action, self.ns(work), self.ns(state.best.trial.workload), self.peak(work))
            case Prove():
                return contested(self.ns(action.start), action.best, self.ns(action.best))
            case Finish():
                return Finished()


def contested(best_ns, work, ns, peak=None, stopped=DECIDED, each=4, processes=5, **fields):
    """Both sides in five processes of four samples; `fields` are those of the result."""
    told = {"n": each * processes, "processes": (each,) * processes, "stopped": stopped}
    second = point(work, ns, peak, **told)
    first = point(work, best_ns, paired_with=second.key, **told)
    first = msgspec.structs.replace(first, key="the best")
    return Contested(**({"points": (first, second), "stopped": stopped, "agreed": RIGHT} | fields))


def pair(action, ns=5 * MS, best_ns=10 * MS, peak=None, **fields):
    return contested(best_ns, action.workload, ns, peak, **fields)


def failed(action, status, reason):
    return Contested(
        points=(point(action.workload), point(action.workload, status=status, reason=reason)), stopped="interrupted"
    )


def setup(target="tiny", memory_bytes=None, limit_bytes=None, keep_exact=False, allow=(), **options):
    start = workload(target, batch=1, **options)
    return Setup(
        start=start,
        memory_bytes=memory_bytes,
        limit_bytes=limit_bytes,
        keep_exact=keep_exact,
        allow=allow,
        logs="run/logs",
    )


def tuned(asked, world, seconds_each=1.0):
    state, elapsed_s = tuner.begin(asked), 0.0
    for _ in range(500):
        if (action := tuner.next_action(state)) is None:
            return state
        elapsed_s += seconds_each
        state = tuner.advance(state, action, world.answer(action, state), elapsed_s)
    raise AssertionError("it does not end")


@pytest.fixture
def few_levers(monkeypatch):
    def choose(**chosen):
        monkeypatch.setattr(levers, "TRIED", {lever: tuple(values) for lever, values in chosen.items()})

    return choose


def decided(state):
    return [(one.value, one.decision.key) for one in state.attempts]


def test_every_lever_is_tried_once_and_is_a_row(few_levers):
    few_levers(attention=("sdpa",), norm=("torch",), loss=("chunked",))
    faster = {"attention": "sdpa", "norm": "torch"}

    def ns(work):
        return 10 * MS - 2 * MS * sum(getattr(work.recipe, lever) == value for lever, value in faster.items())

    world = World(ns)
    state = tuned(setup(attention="naive", norm="eager"), world)
    assert {(a.lever, a.value, a.kept) for a in state.attempts} == {
        ("attention", "sdpa", True),
        ("norm", "torch", True),
        ("loss", "chunked", False),
    }
    first, *_, last = state.rows
    assert isinstance(first, Begun)
    assert isinstance(last, Ended)
    assert (first.step_ns, last.step_ns, last.stopped) == (
        pytest.approx(10 * MS, abs=2),
        pytest.approx(6 * MS, abs=2),
        "nothing left to try",
    )
    assert last.workload.recipe.changed() == {}
    assert [type(action) for action in world.asked[:2]] == [WriteReference, MeasureStart]
    assert all(action.check for action in world.asked[1:-2])
    assert isinstance(world.asked[-2], Prove)
    assert (last.before_ns, last.comparison.verdict) == (pytest.approx(10 * MS, abs=2), "faster")
    assert all(a.comparison.paired for a in state.attempts)


def test_what_was_beaten_is_not_tried_again(few_levers):
    """A lever and its way back: once the first is kept, the second would be the step that it beat."""
    few_levers(loss=("chunked", "full"))
    state = tuned(setup(), World(lambda work: (5 if work.recipe.loss == "chunked" else 10) * MS))
    assert [(a.value, a.kept) for a in state.attempts] == [("chunked", True)]


def test_what_failed_is_tried_again_after_a_lever_that_changes_what_others_are_worth(few_levers):
    few_levers(loss=("chunked",), compile=("default",))

    def ns(work):
        return {"off full": 10, "off chunked": 11, "default full": 8, "default chunked": 7}[
            f"{work.recipe.compile} {work.recipe.loss}"
        ] * MS

    assert decided(tuned(setup(), World(ns))) == [("chunked", "slower"), ("default", "faster"), ("chunked", "faster")]


def test_a_wrong_result_is_not_kept_however_fast(few_levers):
    few_levers(loss=("chunked",))

    state = tuned(setup(), World(MeasurePair=lambda action: pair(action, agreed=WRONG)))
    assert decided(state) == [("chunked", "wrong loss")]
    assert state.attempts[0].decision.values == {"error": 0.25, "allowed": 0.01, "step": 1.0}
    assert state.rows[-1].workload == state.start


def test_what_cannot_run_is_a_row_and_the_rest_goes_on(few_levers):
    few_levers(optimizer=("fused",), loss=("chunked",))

    def refused(action):
        return failed(action, "unsupported", "needs an NVIDIA GPU") if action.move.lever == "optimizer" else None

    state = tuned(setup(), World(MeasurePair=refused))
    found = {a.lever: a for a in state.attempts}
    assert (found["optimizer"].status, found["optimizer"].why) == ("unsupported", "needs an NVIDIA GPU")
    assert found["optimizer"].decision.key == "not run"
    assert found["loss"].status == "ok"


@pytest.mark.parametrize("budget", [4.0, 6.0, 9.0])
def test_the_budget_is_kept(budget):
    state = tuned(msgspec.structs.replace(setup(), budget_s=budget), World(), seconds_each=1.0)
    assert state.attempts
    assert state.rows[-1].stopped == BUDGET_SPENT
    assert budget - 2.0 <= state.elapsed_s <= 1.1 * budget  # with the proof and the last trace


def noisy(action):
    """The challenger's processes differ so much that nothing can be said."""
    found = pair(action)
    times = [round(10 * MS * share) for share in (0.7, 1.4, 0.9, 1.3, 1.0) for _ in range(4)]
    challenger = msgspec.structs.replace(
        found.points[1], phases=(PhaseTimes(phase="step", wall_ns=tuple(times), processes=(4,) * 5),)
    )
    return msgspec.structs.replace(found, points=(found.points[0], challenger))


def test_what_the_processes_leave_open_is_not_kept(few_levers):
    few_levers(loss=("chunked",))
    state = tuned(setup(), World(MeasurePair=noisy))
    assert decided(state) == [("chunked", "inconclusive")]
    assert state.rows[-1].comparison is None  # nothing was kept: there is nothing to prove


@pytest.mark.parametrize(("stopped", "key"), [(MUCH_SLOWER, "slower"), ("budget", "inconclusive")])
def test_rounds_that_are_all_much_slower_decide_though_they_are_few(few_levers, stopped, key):
    few_levers(loss=("chunked",))
    world = World(MeasurePair=lambda action: pair(action, 25 * MS, processes=1, each=2, stopped=stopped))
    state = tuned(setup(), world)
    assert decided(state) == [("chunked", key)]
    assert state.attempts[0].comparison.low is None or key == "inconclusive"


def test_all_levers_together_may_err_as_often_as_one(few_levers):
    """Every one gets a share, which a lever that is kept passes on; the shares of any number sum up to less than the whole."""
    few_levers(attention=("sdpa",), norm=("torch",), loss=("chunked",))
    world = World(lambda work: (5 if work.recipe.loss == "chunked" else 10) * MS)
    state = tuned(setup(attention="naive", norm="eager"), world)
    rates = [action.error_rate for action in world.asked if isinstance(action, MeasurePair)]
    kept = [attempt.kept for attempt in state.attempts]
    spent = sum(rate for rate, was_kept in zip(rates, kept, strict=True) if not was_kept)
    assert 0 < spent < TUNE_ERROR_RATE
    after = [b > a for a, b, was_kept in zip(rates, rates[1:], kept, strict=False) if was_kept]
    assert all(after)
    apart = SPREAD_OUT
    assert sum(apart / ((n + apart) * (n + 1 + apart)) for n in range(100_000)) < 1


# --- memory


ROOMY = 2**50


def test_what_does_not_fit_beside_the_best_is_measured_after_it(few_levers):
    few_levers(loss=("chunked",))
    world = World(peak=lambda work: 78 * GIB)
    tuned(setup(memory_bytes=80 * GIB), world)
    assert [action.together for action in world.asked if isinstance(action, MeasurePair)] == [False]
    tuned(setup(memory_bytes=ROOMY), roomy := World(peak=lambda work: 78 * GIB))
    assert [action.together for action in roomy.asked if isinstance(action, MeasurePair)] == [True]


def test_the_best_that_does_not_run_again_is_a_row(few_levers):
    few_levers(loss=("chunked",))

    def gone(action):
        found = failed(action, "ok", "")
        return msgspec.structs.replace(
            found, points=(point(action.workload, status=OOM, reason="full"), found.points[1])
        )

    (attempt,) = tuned(setup(), World(MeasurePair=gone)).attempts
    assert (attempt.status, attempt.why) == (CRASH, "full")


def test_a_start_that_does_not_fit_is_replaced_by_one_that_does(few_levers):
    few_levers(attention=("sdpa",))
    asked = setup(attention="naive", context=256)
    fits = peak_bytes(msgspec.structs.replace(asked.start, recipe=Recipe()), None)
    asked = msgspec.structs.replace(asked, memory_bytes=int(fits / FIT_MEMORY[0]) + 1)

    def runs_out(action):
        large = action.workload.recipe.attention == "naive"
        return Measured(point=point(action.workload, status=OOM, reason="out of memory")) if large else None

    world = World(MeasureStart=runs_out)
    state = tuned(asked, world)
    alone = [action.workload.recipe.attention for action in world.asked if isinstance(action, MeasureStart)]
    assert alone[:2] == ["naive", "sdpa"]
    assert state.rows[0].workload.recipe.attention == "sdpa"
    assert "made_to_fit" in state.rows[0].note_keys
    assert any("does not fit (out of memory): started with attention = sdpa" in note for note in state.rows[0].notes)


def test_what_no_lever_makes_fit_is_refused():
    world = World(MeasureStart=lambda action: Measured(point=point(action.workload, status=OOM, reason="too large")))
    with pytest.raises(FlopwiseError, match="too large; no lever makes it fit"):
        tuned(setup(memory_bytes=1000), world)


def test_over_its_memory_limit_a_step_takes_what_makes_it_smaller_though_slower(few_levers):
    few_levers()
    world = World(
        ns=lambda work: (15 if work.recipe.checkpoint else 10) * MS,
        peak=lambda work: (3 if work.recipe.checkpoint else 6) * GIB,
    )
    state = tuned(setup(memory_bytes=ROOMY, limit_bytes=4 * GIB), world)
    assert decided(state)[0] == ("1", "under limit")


@pytest.mark.parametrize(
    ("lever", "saving", "memory_bytes", "unseen"),
    [
        ("norm", 0.005, 8 * GIB, True),  # samples that are not interleaved would not show it
        ("norm", 0.005, ROOMY, False),
        ("norm", 0.02, 8 * GIB, False),
        ("graph", 0.005, 8 * GIB, False),  # it makes later measurements steadier
        ("norm", None, 8 * GIB, False),  # not predicted
    ],
)
def test_what_promises_too_little_to_be_seen_is_not_tried(lever, saving, memory_bytes, unseen):
    class Fixed:
        def saving_ns(self, move):
            return saving and saving * 10 * MS

        def peak_bytes(self, move):
            return 6 * GIB

    asked = setup(memory_bytes=memory_bytes)
    state = tuner.TunerState(setup=asked, start=asked.start, best=point(asked.start, peak=6 * GIB), ranking=Fixed())
    assert tuner._too_small_to_see(state, Move(lever=lever, value="x", workload=asked.start)) is unseen


# --- the reference, and the first step


def notes(state):
    return dict(state.notes)


def test_what_could_not_be_checked_says_so_when_it_is_kept(few_levers):
    few_levers(loss=("chunked",))
    world = World(
        lambda work: (5 if work.recipe.loss == "chunked" else 10) * MS,
        WriteReference=lambda action: ReferenceWritten(error="no module named steps"),
        MeasureStart=lambda action: Measured(
            point=point(action.workload), inspection=Inspection(facts=Facts(point=point(action.workload)))
        ),
        MeasurePair=lambda action: pair(action, agreed=AgreementResult()),
    )
    state = tuned(setup(), world)
    assert "no module named steps" in notes(state)["no_reference"]
    assert not any(action.check for action in world.asked[1:-2])
    assert [(a.kept, a.why) for a in state.attempts] == [(True, "faster; losses and gradients not checked")]


def test_a_reference_that_is_not_finite_checks_nothing():
    nan = Agreement(losses=(float("nan"),), reference_losses=())
    world = World(WriteReference=lambda action: ReferenceWritten(agreement=nan))
    state = tuned(setup(), world)
    assert "reference_not_finite" in notes(state)
    assert not world.asked[1].check


def test_a_reference_that_does_not_fit_is_a_lighter_one():
    asked = setup(context=256, precision="bf16")
    plain, lighter = (peak_bytes(levers.reference_of(asked.start, lighter=light), None) for light in (False, True))
    world = World()
    state = tuned(msgspec.structs.replace(asked, memory_bytes=(plain + lighter) // 2), world)
    assert world.asked[0].workload.recipe.checkpoint == 1
    assert "lighter_reference" in notes(state)


def test_a_reference_that_is_not_the_same_twice_judges_nothing(few_levers):
    few_levers(loss=("chunked",))
    asked = setup(attention="naive", norm="eager", activation="eager")

    def measured(action):
        found = point(action.workload)
        return Measured(point=found, agreed=WRONG, inspection=Inspection(facts=Facts(point=found)))

    state = tuned(asked, World(MeasureStart=measured, MeasurePair=lambda action: pair(action, agreed=WRONG)))
    assert decided(state) == [("chunked", "faster")]
    assert state.attempts[0].decision.check == "random"
    assert "not_the_same_twice" in notes(state)
    assert not tuned(setup(), World(MeasureStart=measured)).varies  # that one is just wrong


def test_the_reference_measures_the_rounding_of_every_precision_that_a_bundle_may_have():
    def asked(**options):
        return tuner.next_action(tuner.begin(setup(**options))).precisions

    assert asked(memory_bytes=ROOMY) == ("fp32", "bf16", "bf16-master")
    assert asked() == ("fp32", "bf16")
    assert asked(memory_bytes=ROOMY, allow=("fp8",)) == ("fp32", "bf16", "bf16-master", "fp8")
    assert asked(precision="bf16", keep_exact=True) == ("bf16",)


def test_where_the_profiler_fails_the_first_step_is_measured_without_it():
    def fails_traced(action):
        return Measured(point=point(action.workload, status="error", reason="CUPTI")) if action.trace else None

    world = World(MeasureStart=fails_traced)
    tuned(setup(memory_bytes=ROOMY), world)
    first = [action.trace for action in world.asked if isinstance(action, MeasureStart)]
    assert first == [True, False]


def test_a_start_that_does_not_run_says_why_and_where_its_log_is():
    crashed = World(MeasureStart=lambda action: Measured(point=point(action.workload, status=CRASH, reason="SIGSEGV")))
    with pytest.raises(FlopwiseError, match="crash: SIGSEGV") as raised:
        tuned(setup(), crashed)
    assert "run/logs" in raised.value.hint


def test_notes_before_anything_is_measured():
    assert notes(tuner.begin(setup(limit_bytes=GIB))) == {
        "no_memory_limit": "on the CPU a step's peak memory is not measured: the memory limit is ignored"
    }
    assert "starts in bf16" in notes(tuner.begin(setup(precision="bf16", keep_exact=True)))["starts_rounded"]
    assert notes(tuner.begin(setup())) == {}
    assert "4 to 6 % off (bf16: 0.2 %)" in notes(tuner.begin(setup(allow=("fp8",))))["fp8_allowed"]


# --- the end


def test_an_interruption_keeps_what_was_measured():
    state = tuner.begin(setup())
    assert tuner.interrupted(state) is None
    world = World()
    for _ in range(3):
        action = tuner.next_action(state)
        state = tuner.advance(state, action, world.answer(action, state), 1.0)
    end = tuner.interrupted(state)
    assert (end.stopped, end.trace) == ("interrupted", None)
    state = tuner.advance(state, end, Finished(), 2.0)
    assert [type(row).__name__ for row in state.rows] == ["Begun", "Attempt", "Ended"]
    assert tuner.next_action(state) is None


def test_the_last_step_is_traced_if_it_is_another_and_there_is_a_gpu(few_levers):
    few_levers(loss=("chunked",))
    faster = World(lambda work: (5 if work.recipe.loss == "chunked" else 10) * MS)
    tuned(setup(memory_bytes=ROOMY), faster)
    assert faster.asked[-1].trace.recipe.loss == "chunked"
    tuned(setup(), faster)
    assert faster.asked[-1].trace is None
    tuned(setup(memory_bytes=ROOMY), same := World())
    assert same.asked[-1].trace is None


def test_a_throttled_gpu_is_noted(few_levers):
    few_levers()
    hot = World(Finish=lambda action: Finished(throttle=((), ("software power cap",), ("software power cap",))))
    (note,) = tuned(setup(), hot).rows[-1].notes
    assert "throttled (software power cap) in 2 of 3 measurements" in note


def test_the_layers_that_are_in_fp8_are_told_at_the_end(few_levers):
    few_levers()
    world, told = World(), "4 linear layers in fp8; not head (outside the blocks)"
    right = world.answer

    def answer(action, state):
        found = right(action, state)
        if not isinstance(action, MeasureStart):
            return found
        ran = msgspec.structs.replace(found.point.ran or Ran(device="cuda"), linear=told)
        return msgspec.structs.replace(found, point=msgspec.structs.replace(found.point, ran=ran))

    world.answer = answer
    assert tuned(setup(), world).rows[-1].notes == (told,)


def test_an_answer_to_another_question_is_refused():
    state = tuner.begin(setup())
    with pytest.raises(TypeError, match="Finished is no answer to WriteReference"):
        tuner.advance(state, tuner.next_action(state), Finished(), 0.0)


# --- laws


SPEEDS = st.dictionaries(
    st.sampled_from(["sdpa", "torch", "chunked", "fused", "default", "blocks", "bf16", "eager"]),
    st.sampled_from([0.5, 0.8, 1.0, 1.3]),
)


@settings(max_examples=12, deadline=None)
@given(SPEEDS, st.booleans())
def test_it_ends_and_the_best_only_gets_faster(speeds, keep_exact):
    """Whatever the levers do: no step is measured twice, none that was beaten returns, and the last is the fastest kept."""

    def ns(work):
        factors = (speeds.get(str(value), 1.0) for value in work.recipe.changed().values())
        result = 10.0 * MS
        for factor in factors:
            result *= factor
        return round(result)

    world = World(ns)
    state = tuned(setup(norm="eager", keep_exact=keep_exact), world)
    kept = [a for a in state.attempts if a.kept]
    times = [state.rows[0].step_ns, *(a.after_ns for a in kept)]
    assert all(after < before for before, after in itertools.pairwise(times))
    measured = [action.workload for action in world.asked if isinstance(action, MeasurePair)]
    steps = [msgspec.json.encode(work) for work in measured]
    assert len(steps) == len(set(steps)) or any(a.lever in levers.REDONE_BY for a in kept)
    assert state.rows[-1].step_ns == pytest.approx(times[-1], abs=2)
    assert not keep_exact or state.rows[-1].workload.recipe.precision == "fp32"
