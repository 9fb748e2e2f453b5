"""The tuner as a pure state machine: what to measure next, and what a measurement decides. No process, file or clock here.

    state = begin(setup)
    while (action := next_action(state)) is not None:
        state = advance(state, action, <what carrying it out gave>, elapsed_s)

`flopwise.api.tune` carries the actions out. Each row that a state has more than the one before it is to be stored.
"""

import math
from collections.abc import Sequence
from functools import partial

import msgspec

from flopwise.advice import constants, decisions
from flopwise.advice import tuner_actions as actions
from flopwise.advice.bundles import BEST, Refused, next_bundle, predicted_bundle, worth_of_each
from flopwise.advice.moves import COSTS, GPU_ONLY, REDONE_BY, ROUNDED, Move, moves, reference_of, seconds_to_try, to_fit
from flopwise.advice.moves import with_requested as tried_levers
from flopwise.advice.ranking import MoveRanking
from flopwise.analysis.matching import compare_points
from flopwise.capture.interleave import Contested
from flopwise.capture.stopping import MUCH_FASTER, MUCH_FASTER_RATIO, MUCH_SLOWER, MUCH_SLOWER_RATIO
from flopwise.errors import FlopwiseError
from flopwise.predict.prediction import peak_bytes
from flopwise.records.comparison import FASTER, INCONCLUSIVE, SLOWER, Comparison
from flopwise.records.run import CRASH, INTERRUPTED, OK, OOM, Point
from flopwise.records.tuning import BUDGET_SPENT, NOTHING_LEFT, Attempt, Begun, Decision, Ended, Row
from flopwise.records.written import as_written
from flopwise.spec.workload import UserStep, Workload, levers
from flopwise.statistics import FEWEST

START = "start"  # the group of the step before anything is changed


class TunerState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the next choice depends on."""

    setup: actions.Setup
    start: Workload  # the step that is tuned: the one asked for, or one that fits in its place
    elapsed_s: float = 0.0
    notes: tuple[tuple[str, str], ...] = ()  # key and text
    reference: Workload | None = None  # None: not written yet
    can_check: bool = False
    varies: bool = False  # not even the reference gives the same results twice
    too_large: Point | None = None  # the step asked for, if it does not fit
    fit_tries: int = 0
    trace_start: bool = True
    best: Point | None = None
    ranking: MoveRanking | None = None
    tried: frozenset[tuple[str, str]] = frozenset()  # a lever and the move's name
    refused: Refused = frozenset()  # levers that a step cannot have, with their values
    beaten: tuple[Workload, ...] = ()
    carried: float = 0.0  # error rate that a kept lever passes on to the next: what was no error spends none
    proof: Contested | None = None  # the first step against the best
    took_s: tuple[float, ...] = ()  # what each attempt took
    start_s: float = 0.0  # what measuring the first step took
    rows: tuple[Row, ...] = ()

    @property
    def attempts(self) -> list[Attempt]:
        return [row for row in self.rows if isinstance(row, Attempt)]


def begin(setup: actions.Setup) -> TunerState:
    """Before anything is measured."""
    state = TunerState(setup=setup, start=setup.start)
    precision = setup.start.recipe.precision
    if setup.limit_bytes is not None and not setup.on_gpu:
        text = "on the CPU a step's peak memory is not measured: the memory limit is ignored"
        state = _noted(state, "no_memory_limit", text)
    if setup.keep_exact and precision in ROUNDED["precision"]:
        text = f"the step starts in {precision}, which stays: --keep-exact only excludes levers that round more"
        state = _noted(state, "starts_rounded", text)
    for name in setup.allow:
        state = _noted(state, f"{name}_allowed", COSTS[name])
    return state


def next_action(state: TunerState) -> actions.Action | None:
    """What to measure next; None: it is over."""
    if state.rows and isinstance(state.rows[-1], Ended):
        return None
    if state.reference is None:
        precisions, levers = _precisions(state.setup), BEST if state.setup.on_gpu else {}
        return actions.WriteReference(workload=_reference(state.setup), precisions=precisions, levers=levers)
    if state.best is None:
        return _measure_start(state)
    move = None if state.proof is not None else next_move(state)
    spent = move is not None and _out_of_time(state, move)
    if move is None or spent:
        return _prove(state) or _finish(state, BUDGET_SPENT if spent and move is not None else NOTHING_LEFT)
    return actions.MeasurePair(
        move=move,
        group=f"attempt {len(state.attempts) + 1}",
        error_rate=error_rate(state),
        together=fits_beside_best(state, move),
        check=state.can_check,
    )


def advance(state: TunerState, action: actions.Action, result: actions.Result, elapsed_s: float) -> TunerState:
    """The state after an action was carried out; raises FlopwiseError where there is nothing to go on with."""
    took_s = elapsed_s - state.elapsed_s
    state = msgspec.structs.replace(state, elapsed_s=elapsed_s)
    match action, result:
        case actions.WriteReference(), actions.ReferenceWritten():
            return _referenced(state, action.workload, result)
        case actions.MeasureStart(), actions.Measured():
            return _started(msgspec.structs.replace(state, start_s=took_s), action, result)
        case actions.MeasurePair(), Contested():
            return _pair_measured(msgspec.structs.replace(state, took_s=(*state.took_s, took_s)), action, result)
        case actions.Prove(), Contested():
            return msgspec.structs.replace(state, proof=result)
        case actions.Finish(), actions.Finished():
            return _ended(state, action, result)
        case _:
            raise TypeError(f"{type(result).__name__} is no answer to {type(action).__name__}")


# --- the reference


def _reference(setup: actions.Setup) -> Workload:
    """In eager fp32; with less memory where that does not fit."""
    plain = reference_of(setup.start)
    peak = peak_bytes(plain, setup.gpu)
    return reference_of(setup.start, lighter=True) if peak is not None and peak > _memory(setup) else plain


def _precisions(setup: actions.Setup) -> tuple[str, ...]:
    """Those that a step of this run may have: of each, the reference's own rounding is measured."""
    tried = (
        ()
        if setup.keep_exact or "precision" not in levers(setup.start.subject)
        else tried_levers(setup.allow).get("precision", ())
    )
    possible = [one for one in tried if setup.on_gpu or one not in GPU_ONLY["precision"]]
    possible = [one for one in possible if one != "tf32"]  # no bundle has it, and each takes a run of its own
    return tuple(dict.fromkeys((setup.start.recipe.precision, *possible)))


def _memory(setup: actions.Setup) -> float:
    return math.inf if setup.memory_bytes is None else setup.memory_bytes


def _referenced(state: TunerState, reference: Workload, result: actions.ReferenceWritten) -> TunerState:
    first, error = result.agreement, result.error
    if reference != reference_of(state.setup.start):
        text = f"in eager fp32 it does not fit: the reference is {reference.label()}"
        state = _noted(state, "lighter_reference", text)
    if first is None:
        state = _noted(state, "no_reference", f"no reference to compare with: {error}")
    elif any(not math.isfinite(x) for x in (*first.losses, first.gradient_error or 0.0)):
        text = "the reference's own loss or gradients are not finite: nothing can be checked"
        state, first = _noted(state, "reference_not_finite", text), None
    asked = result.agreement.refused if result.agreement is not None else ()
    refused = frozenset((lever, BEST[lever]) for lever in asked if lever in BEST)
    return msgspec.structs.replace(state, reference=reference, can_check=first is not None, refused=refused)


# --- the step to start from


def _measure_start(state: TunerState) -> actions.MeasureStart:
    start = state.setup.start if state.too_large is None else _fitting(state)[-1].workload
    trace = state.trace_start and state.setup.on_gpu
    samples = FEWEST if trace else 2 * FEWEST
    return actions.MeasureStart(workload=start, samples=samples, trace=trace, check=state.can_check)


def _fitting(state: TunerState) -> list[Move]:
    """The moves that make a step fit that does not; more of them with every try."""
    setup, failed, n = state.setup, state.too_large, state.fit_tries
    assert failed is not None
    room = constants.FIT_MEMORY[n] * _memory(setup) if n < len(constants.FIT_MEMORY) else 0.0
    path = to_fit(setup.start, setup.gpu, room, keep_exact=setup.keep_exact) if room else []
    if not path:
        raise FlopwiseError(f"{setup.start.label()}: {failed.reason}; no lever makes it fit", failed.hint)
    return path


def _started(state: TunerState, action: actions.MeasureStart, result: actions.Measured) -> TunerState:
    point = result.point
    if point.status == OK:
        return _begun(state, action.workload, result)
    if point.status == OOM and state.setup.on_gpu and peak_bytes(action.workload, state.setup.gpu) is not None:
        tries = state.fit_tries + (state.too_large is not None)
        return msgspec.structs.replace(state, too_large=state.too_large or point, fit_tries=tries)
    if action.trace:  # perhaps it was the profiler that failed
        return msgspec.structs.replace(state, trace_start=False)
    where = f" ({state.setup.logs})" if point.status == CRASH and state.setup.logs else ""
    raise FlopwiseError(f"{action.workload.label()}: {point.status}: {point.reason}", f"{point.hint}{where}")


def _begun(state: TunerState, start: Workload, result: actions.Measured) -> TunerState:
    point, inspection, agreement = as_written(result.point), result.inspection, result.agreed.agreement
    assert inspection is not None
    inspection = msgspec.structs.replace(inspection, facts=msgspec.structs.replace(inspection.facts, point=point))
    start = point.trial.workload if isinstance(start.subject, UserStep) else start
    if state.too_large is not None:
        names = ", ".join(move.name for move in _fitting(state))
        text = f"{state.setup.start.label()} does not fit ({state.too_large.reason}): started with {names}"
        state = _noted(state, "made_to_fit", text)
    # Not even the reference itself gives the same results in another process.
    varies = start == reference_of(start) and decisions.disagreement(agreement) is not None
    state = msgspec.structs.replace(state, varies=varies)
    if varies:
        text = "run again from the same seed, the step gives other results: losses and gradients are shown, not judged"
        state = _noted(state, "not_the_same_twice", text)
    if not state.setup.on_gpu:
        state = _noted(state, "no_trace", "on the CPU there is no GPU trace: no waterfall, no findings")
    elif inspection.problem:
        state = _noted(state, "no_trace", f"no findings of the first step: {inspection.problem}")
    row = Begun(
        workload=start,
        step_ns=decisions.step_ns(point),
        peak_bytes=decisions.peak(point.memory),
        gpu=state.setup.gpu_name,
        waterfall=inspection.facts.waterfall,
        findings=inspection.findings,
        agreement=agreement,
        ran=point.ran,
        notes=tuple(text for _, text in state.notes),
        note_keys=tuple(key for key, _ in state.notes),
    )
    ranking = MoveRanking(inspection.facts, inspection.findings)
    return msgspec.structs.replace(state, start=start, best=point, ranking=ranking, rows=(*state.rows, row))


# --- which lever next


def _out_of_time(state: TunerState, move: Move) -> bool:
    """Whether a lever would end after the budget, with what comes after it: the proof, and the last step's trace."""
    typical = max(state.took_s[-2:], default=0.0)
    next_s = typical or state.start_s + seconds_to_try(move)
    after_s = state.start_s + (typical if sum(one.kept for one in state.attempts) else 0.0)
    late = state.elapsed_s + next_s + after_s > (1 + constants.BUDGET_SLACK) * state.setup.budget_s
    return state.elapsed_s > state.setup.budget_s or (late and bool(state.took_s))


def next_move(state: TunerState) -> Move | None:
    """The most promising lever that was not tried yet; None: nothing is worth trying."""
    best, ranking, setup = _best(state), _ranking(state), state.setup
    over = setup.limit_bytes is not None and (decisions.peak(best.memory) or 0) > setup.limit_bytes
    if not over and (bundle := _bundle(state)) is not None:
        return bundle
    allowed = _moves(state, best.trial.workload, setup.allow, smaller=over)
    new = [one for one in allowed if one.workload not in state.beaten and (one.lever, one.name) not in state.tried]
    if not setup.on_gpu:  # on a CPU half precision is seldom faster
        new.sort(key=lambda move: move.lever == "precision")
    least_ns = -math.inf if over else constants.WORTH_TRYING * decisions.step_ns(best)
    while (move := ranking.choose(new, least_ns)) is not None and not over and _too_small_to_see(state, move):
        new.remove(move)
    return move


def _moves(state: TunerState, work: Workload, allow: Sequence[str], *, smaller: bool = False) -> list[Move]:
    """From a step on, without what it was seen not to have."""
    setup = state.setup
    allowed = moves(work, keep_exact=setup.keep_exact, smaller=smaller, on_gpu=setup.on_gpu, allow=allow)
    return [one for one in allowed if not state.refused & set(one.levers.items())]


def _bundle(state: TunerState) -> Move | None:
    """Many levers at once, on a GPU."""
    work, setup, attempts = _best(state).trial.workload, state.setup, state.attempts
    if not setup.on_gpu:
        return None
    if isinstance(work.subject, UserStep):
        return next_bundle(work, attempts, state.refused, keep_exact=setup.keep_exact)
    room = min(constants.PAIR_MEMORY * _memory(setup), setup.limit_bytes or math.inf)
    return predicted_bundle(work, attempts, _ranking(state), partial(_moves, state), room, setup.allow)


def _too_small_to_see(state: TunerState, move: Move) -> bool:
    """Whether its prediction is less than two steps show that are not measured side by side."""
    saving_ns = _ranking(state).saving_ns(move)
    small = saving_ns is not None and saving_ns < constants.WORTH_TRYING_ALONE * decisions.step_ns(_best(state))
    return small and move.lever != "graph" and not fits_beside_best(state, move)


def fits_beside_best(state: TunerState, move: Move) -> bool:
    """Whether both steps fit the device at once."""
    best_bytes = decisions.peak(_best(state).memory) or 0
    return best_bytes + (_ranking(state).peak_bytes(move) or best_bytes) < constants.PAIR_MEMORY * _memory(state.setup)


def error_rate(state: TunerState) -> float:
    """Of the next lever's verdict: many are tried, and all of them together may err as often as one.

    Its share, and what the lever before it had if that was kept (Wiens' fallback procedure).
    """
    n, apart = sum(attempt.comparison is not None for attempt in state.attempts), constants.SPREAD_OUT
    return state.carried + constants.TUNE_ERROR_RATE * apart / ((n + apart) * (n + 1 + apart))


# --- what a measurement decides


def _pair_measured(state: TunerState, action: actions.MeasurePair, result: Contested) -> TunerState:
    move, failed = action.move, result.failed
    if failed is not None:
        if failed is result.points[0]:
            reason = failed.reason or "the best step's process ended"
            failed = msgspec.structs.replace(result.points[1], status=CRASH, reason=reason)
        return _failed(state, move, failed)
    found = _with_early_end(compare_points(*result.points, error_rate=action.error_rate), result.stopped)
    return _judged(state, action, found, result)


def _with_early_end(found: Comparison, stopped: str) -> Comparison:
    """The verdict where rounds ended early because all of them said the same; there is no interval then."""
    if stopped == MUCH_FASTER and found.verdict == INCONCLUSIVE:  # by few samples, of long steps
        reason = f"more than {MUCH_FASTER_RATIO:g} times as fast in every round"
        return msgspec.structs.replace(found, verdict=FASTER, reason=reason, settle="")
    if stopped != MUCH_SLOWER:
        return found
    reason = f"more than {MUCH_SLOWER_RATIO:g} times as slow in every round"
    return msgspec.structs.replace(found, verdict=SLOWER, reason=reason, low=None, high=None, settle="")


def _failed(state: TunerState, move: Move, point: Point) -> TunerState:
    decision = Decision(key=decisions.NOT_RUN, detail=point.reason)
    failed = {"status": point.status, "why": point.reason, "decision": decision}
    named = {(lever, value) for lever, value in move.levers.items() if lever in point.levers}
    state = msgspec.structs.replace(state, refused=state.refused | named)
    return _tried(state, move, msgspec.structs.replace(_attempt(state, move), **failed))


def _judged(state: TunerState, action: actions.MeasurePair, found: Comparison, result: Contested) -> TunerState:
    """Keep the lever, or not: faster or smaller, and right."""
    move, (before, after), agreed = action.move, result.points, result.agreed
    sizes = decisions.peak(before.memory or _best(state).memory), decisions.peak(after.memory)
    decision = decisions.decide(found, *sizes, state.setup.limit_bytes, steadier=move.lever == "graph")
    decision = decisions.checked(decision, agreed, state.varies)
    attempt = msgspec.structs.replace(
        _attempt(state, move),
        before_ns=decisions.step_ns(before),
        after_ns=decisions.step_ns(after),
        comparison=found,
        before_bytes=sizes[0],
        after_bytes=sizes[1],
        agreement=agreed.agreement,
        kept=(kept := decision.key in decisions.KEPT),
        worth_ns=worth_of_each(move, _best(state).trial.workload, _ranking(state)) if kept else {},
        why=decisions.describe(decision),
        decision=decision,
    )
    carried = action.error_rate if decision.key == FASTER else 0.0
    state = msgspec.structs.replace(_tried(state, move, attempt), carried=carried)
    return _with_best(state, move, after) if attempt.kept else state


def _attempt(state: TunerState, move: Move) -> Attempt:
    ranking = _ranking(state)
    return Attempt(
        lever=move.lever,
        value=move.value,
        also=move.also,
        before=str(getattr(_best(state).trial.workload.recipe, move.lever)),
        status=OK,
        predicted_ns=ranking.saving_ns(move),
        arithmetic=ranking.arithmetic(move),
        rules=tuple(finding.rule for finding in ranking.asking(move)),
    )


def _tried(state: TunerState, move: Move, attempt: Attempt) -> TunerState:
    tried = state.tried | {(move.lever, move.name)}
    return msgspec.structs.replace(state, rows=(*state.rows, attempt), tried=tried)


def _with_best(state: TunerState, move: Move, point: Point) -> TunerState:
    """With a new best step. After some levers, what failed before may be worth another try."""
    tried = state.tried
    if move.lever in REDONE_BY:
        kept = {(attempt.lever, attempt.name) for attempt in state.attempts if attempt.kept}
        tried = frozenset(one for one in tried if one[0] == move.lever or one in kept)
    beaten = (*state.beaten, _best(state).trial.workload)
    ranking = _ranking(state).after(point)
    return msgspec.structs.replace(state, best=point, ranking=ranking, tried=tried, beaten=beaten)


# --- the end


def _prove(state: TunerState) -> actions.Prove | None:
    """The first step against the best, once; None where they are the same."""
    best = _best(state)
    if state.proof is not None or best.trial.workload == state.start:
        return None
    if sum(attempt.kept for attempt in state.attempts) == 1:  # which was measured against the first step itself
        return None
    first = next(row for row in state.rows if isinstance(row, Begun))
    both = (first.peak_bytes or 0) + (decisions.peak(best.memory) or 0)
    together = both < constants.PAIR_MEMORY * _memory(state.setup)
    return actions.Prove(start=state.start, best=best.trial.workload, together=together)


def _finish(state: TunerState, stopped: str) -> actions.Finish:
    best = _best(state).trial.workload
    trace = best if best != state.start and state.setup.on_gpu and stopped != INTERRUPTED else None
    return actions.Finish(stopped=stopped, trace=trace)


def interrupted(state: TunerState) -> actions.Finish | None:
    """How to end it at once, keeping what was measured; None: there is nothing to keep yet."""
    return _finish(state, INTERRUPTED) if state.best is not None else None


def _ended(state: TunerState, action: actions.Finish, result: actions.Finished) -> TunerState:
    best, proof = _best(state), state.proof
    proven = proof is not None and proof.failed is None and proof.stopped != INTERRUPTED
    kept = [attempt for attempt in state.attempts if attempt.kept]
    alone = kept[0] if len(kept) == 1 and not proven else None  # measured against the first step itself
    row = Ended(
        workload=best.trial.workload,
        step_ns=decisions.step_ns(proof.points[1] if proven and proof else best),
        before_ns=decisions.step_ns(proof.points[0]) if proven and proof else alone.before_ns if alone else None,
        comparison=compare_points(*proof.points) if proven and proof else alone.comparison if alone else None,
        peak_bytes=decisions.peak(best.memory),
        waterfall=result.waterfall,
        stopped=action.stopped,
        seconds=state.elapsed_s,
        notes=(*decisions.fp8_notes(best), *decisions.throttle_notes(result.throttle)),
    )
    return msgspec.structs.replace(state, rows=(*state.rows, row))


# --- small questions


def _noted(state: TunerState, key: str, text: str) -> TunerState:
    return msgspec.structs.replace(state, notes=(*state.notes, (key, text)))


def _best(state: TunerState) -> Point:
    assert state.best is not None
    return state.best


def _ranking(state: TunerState) -> MoveRanking:
    assert state.ranking is not None
    return state.ranking
