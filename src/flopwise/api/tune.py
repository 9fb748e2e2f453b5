"""Make a step faster and prove it: every lever that promises something, tried in turns with the best so far."""

import math
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from flopwise import units
from flopwise.advice.moves import REDONE_BY, ROUNDED, Move, moves, reference_of, to_fit
from flopwise.advice.tuning import decide, told, wrong
from flopwise.analysis.comparison import compare_samples
from flopwise.api.tune_facts import Look, Outlook
from flopwise.api.tune_samples import gpu_name, peak_bytes, sampled, slowed, step_ns, timed, undecided, walls
from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress, Silent
from flopwise.capture.turns import HOPELESS, HOPELESS_RATIO, PLAIN, PLAIN_RATIO, Contestant, take_turns
from flopwise.errors import FlopwiseError
from flopwise.predict.dry_step import needs_dry_run
from flopwise.predict.fit import peak_of
from flopwise.records.comparison import FASTER, SLOWER, Comparison
from flopwise.records.events import AgreementRequest, AgreementResult, DeviceInfo, Event, TraceRequest
from flopwise.records.run import OK, OOM, Point
from flopwise.records.tuning import Attempt, Begun, Ended, Row, Tuning
from flopwise.spec import fields
from flopwise.spec.workload import OpSpec, Sampling, Trial, Workload, workload
from flopwise.statistics import FEWEST
from flopwise.store import Run, runs_root
from flopwise.store.rows import append_row
from flopwise.store.tuning import ROWS, read_tuning

START = "start"  # the group of the step before anything is changed
WORTH = 0.003  # of the step: less is not tried, if it is predicted
SEEN_ALONE = 0.01  # the same for two steps that cannot run in turns: their samples would not tell less apart
ROOM = 0.95  # of the GPU's memory, for two steps side by side; if they do not fit after all, they are measured alone
MORE, MORE_SECONDS = 3, 4.0  # times as many rounds and seconds for two that the first rounds do not tell apart; once
ALONE = 2 * FEWEST  # samples of a step that is not measured in turns: what drifts does not drift under both
DETAILS = 3  # samples of a step by phase and by the GPU's clock: what predicts needs them, what compares does not
UNCHECKED = "losses and gradients not checked"
DRAWS = "losses and gradients not judged: the step draws random numbers"
FITTING = (0.92, 0.8, 0.65)  # of it, for a step in the place of one that does not fit, until one runs


def tune(
    target: str | Workload,
    *,
    budget: float = 600.0,
    memory_limit: int | None = None,
    keep_exact: bool = False,
    device: str = "auto",
    seconds: float = 3.0,
    timeout: float = 900.0,
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
    **options: Any,
) -> Tuning:
    """Try the levers, most promising first, each in turns with the best so far; keep what is faster or smaller and right.

    `budget` is in seconds: after it, no further lever is begun. `memory_limit` is the most a step may hold, in bytes.
    `keep_exact` leaves out lower precisions. Every lever kept has its losses and gradients compared with the same
    step by hand in fp32.

    >>> flopwise.tune("small").best.recipe.changed()        # doctest: +SKIP
    {'precision': 'bf16', 'attention': 'sdpa-cudnn', 'optimizer': 'fused', 'compile': 'default', 'graph': 'on'}
    """
    fields.number("budget", budget, 1.0, 7 * 86_400)
    if memory_limit is not None:
        fields.whole("memory_limit", memory_limit, 1, 2**63)
        if not 2**20 <= memory_limit <= 2**50:
            raise FlopwiseError(
                f"no step fits a memory limit of {units.size(memory_limit)}", "from 1MiB to 1024TiB: 40GiB"
            )
    start = target if isinstance(target, Workload) else workload(target, **options)
    if isinstance(start.subject, OpSpec):
        raise FlopwiseError(
            f"{start.target} is one operation: there is nothing to tune", f"try: flopwise bench {start.target} --impl …"
        )
    sampling = Sampling(seconds=seconds, timeout_s=timeout)
    with Worker() as worker:
        there = worker.look(device)
        plan = [Trial(workload=start, sampling=sampling, device=device, group=START)]
        with Run.create(runs_root(runs), "tune", start.target, command, plan) as run:
            tuner = _Tuner(
                run=run, worker=worker, there=there, sampling=sampling, device=device, progress=progress or Silent(),
                limit_bytes=memory_limit, keep_exact=keep_exact, budget=budget,
            )  # fmt: skip
            tuner.tune(start)
            return read_tuning(run.path)


class _Tuner:
    """The best recipe so far, and the process that runs it."""

    def __init__(
        self,
        *,
        run: Run,
        worker: Worker,
        there: DeviceInfo,
        sampling: Sampling,
        device: str,
        progress: Progress,
        limit_bytes: int | None,
        keep_exact: bool,
        budget: float,
    ) -> None:
        self.run, self.worker, self.there, self.sampling = run, worker, there, sampling
        self.device, self.progress = device, progress
        self.memory_bytes = there.environment.gpu.memory_bytes if there.environment.gpu else None
        self.limit_bytes, self.keep_exact = limit_bytes, keep_exact
        self.began, self.budget = time.monotonic(), budget
        self.attempts: list[Attempt] = []
        self.tried: set[tuple[str, str]] = set()  # a lever and the move's name
        self.beaten: list[Workload] = []
        self.resident: Contestant | None = None
        self.idle: list[Worker] = []  # with torch loaded, which takes seconds
        self.reference = run.memory_path("reference.npz")
        self.no_reference = ""
        self.draws = False  # a step that does may draw others with a lever: that is no error
        self.notes: list[str] = []
        self.held_back: list[tuple[str, ...]] = []  # of every measurement, why the GPU's clock was not what it can be
        self.look = Look(run, worker, there, device)

    def tune(self, start: Workload) -> None:
        stopped = "nothing left to try"
        self.progress.begin(0, 0)
        if self.limit_bytes is not None and self.memory_bytes is None:
            self._note("on the CPU a step's peak memory is not measured: the memory limit is not looked at")
        if self.keep_exact and start.recipe.precision in ROUNDED["precision"]:
            self._note(
                f"the step begins in {start.recipe.precision}, which stays: --keep-exact keeps levers out that round more"
            )
        try:
            if self.there.environment.gpu is not None:  # on the CPU they would be in the way of what is measured first
                self.idle = [Worker(compiler=True, wait=False) for _ in range(2)]
            self._write_reference(start)
            self.best, agreed = self._measured_alone(start, self.look.request("before"))
            if self.best.status != OK:
                self.best, agreed = self._made_to_fit(start)
                start = self.best.trial.workload
            seen = self.look.seen(self.best, "before")
            self.outlook = Outlook(seen.facts, seen.findings)
            agreement = agreed.agreement
            if start == reference_of(start) and wrong(agreement, start.recipe.precision):
                self.draws = True  # not even the same step does the same twice
            if self.draws:
                self._note(
                    "the step draws random numbers, as dropout does: a lever's losses and gradients are shown, not judged"
                )
            self._keep(
                Begun(
                    workload=start, step_ns=step_ns(self.best), peak_bytes=peak_bytes(self.best.memory),
                    gpu=gpu_name(self.there), waterfall=seen.waterfall, findings=seen.findings,
                    agreement=agreement, notes=(*self.notes, *seen.notes),
                )
            )  # fmt: skip
            while (move := self._next(self.best.trial.workload)) is not None:
                if self.seconds > self.budget:
                    stopped = f"the budget of {units.duration(self.budget * 1e9)} is spent"
                    break
                self._keep(self._try(move))
        except KeyboardInterrupt:
            stopped = "interrupted"
        finally:
            self._dismiss()
            for worker in self.idle:
                worker.close()
            self.progress.end()
        if not hasattr(self, "outlook"):
            raise KeyboardInterrupt
        self._keep(self._ended(start, stopped))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def _keep(self, row: Row) -> None:
        append_row(self.run.path / ROWS, row)
        if isinstance(row, Attempt):
            self.attempts.append(row)
            self.progress.note(told(row))

    def _ended(self, start: Workload, stopped: str) -> Ended:
        best = self.best.trial.workload
        seen = self.look.at(best, self.best, "after") if best != start and stopped != "interrupted" else None
        return Ended(
            workload=best, step_ns=step_ns(self.best), peak_bytes=peak_bytes(self.best.memory),
            waterfall=seen.waterfall if seen else None, stopped=stopped, seconds=self.seconds, notes=slowed(self.held_back),
        )  # fmt: skip

    def _append(self, point: Point) -> None:
        self.run.append(point)
        self.held_back.append(point.telemetry.throttle if point.telemetry else ())

    # --- which lever next

    def _next(self, current: Workload) -> Move | None:
        over = self.limit_bytes is not None and (peak_bytes(self.best.memory) or 0) > self.limit_bytes
        on_gpu = self.there.environment.gpu is not None
        allowed = moves(current, keep_exact=self.keep_exact, smaller=over, on_gpu=on_gpu)
        new = [move for move in allowed if move.workload not in self.beaten]
        open_moves = [move for move in new if (move.lever, move.name) not in self.tried]
        if not on_gpu:  # there, half precision is seldom the faster
            open_moves.sort(key=lambda move: move.lever == "precision")
        least_ns = -math.inf if over else WORTH * step_ns(self.best)
        while (move := self.outlook.choose(open_moves, least_ns)) is not None and not over and self._unseen(move):
            open_moves.remove(move)
        return move

    def _unseen(self, move: Move) -> bool:
        """Whether it promises too little to be told from nothing by steps measured one after the other."""
        saving_ns = self.outlook.saving_ns(move)
        small = saving_ns is not None and saving_ns < SEEN_ALONE * step_ns(self.best)
        return small and move.lever != "graph" and not self._side_by_side(move)

    # --- one lever

    def _try(self, move: Move) -> Attempt:
        self.tried.add((move.lever, move.name))
        before = self.best
        first = Attempt(
            lever=move.lever, value=move.value, also=move.also, before=str(getattr(before.trial.workload.recipe, move.lever)),
            status=OK, predicted_ns=self.outlook.saving_ns(move), arithmetic=self.outlook.arithmetic(move),
            rules=self.outlook.rules(move),
        )  # fmt: skip
        trial = self._trial(move.workload)
        self.progress.trial(trial)
        if self._side_by_side(move):
            attempt = self._in_turns(first, trial)
            if attempt.status != OOM or self.memory_bytes is None:
                return attempt
        self._dismiss()  # perhaps there is room for one of them
        point, agreed = self._measured_alone(move.workload)
        if point.status != OK:
            return msgspec.structs.replace(first, status=point.status, why=point.reason)
        found = compare_samples(walls(before), walls(point), paired=False)
        attempt = self._judged(timed(first, walls(before), walls(point)), before, point, found, agreed)
        if attempt.kept:
            self._crown(move.lever, point)
        return attempt

    def _in_turns(self, first: Attempt, trial: Trial) -> Attempt:
        incumbent = self._incumbent()
        log = self.run.log_path(trial.key())
        challenger = Contestant(
            trial, log, self.progress.event, paired_with=self.best.trial.key(), worker=self._worker(),
            compare=self._compare, details=DETAILS,
        )  # fmt: skip
        try:
            if not challenger.get_ready():
                point = self._let_go(challenger)
                return msgspec.structs.replace(first, status=point.status, why=point.reason)
            ready = incumbent.warm_again() and challenger.warm_again()
            was = len(incumbent.gathered.samples)
            stopped = take_turns(incumbent, challenger, fewest=FEWEST) if ready else "interrupted"
            mine, others = (sampled(one) for one in (incumbent, challenger))
            if stopped not in ("interrupted", HOPELESS, PLAIN) and undecided(mine[was:], others):
                rounds = int(MORE_SECONDS * 1e9 * self.sampling.seconds / (median(mine) + median(others)))
                stopped = take_turns(incumbent, challenger, fewest=max(FEWEST, min(MORE * FEWEST, rounds)))
                mine, others = (sampled(one) for one in (incumbent, challenger))
            if stopped == "interrupted":
                return self._broken(first, challenger)
            before = msgspec.structs.replace(self.best, memory=incumbent.memory or self.best.memory)
            after = msgspec.structs.replace(
                before, trial=trial, key=trial.key(), memory=challenger.memory, phases=challenger.gathered.times(),
                telemetry=challenger.telemetry,
            )  # fmt: skip
            found = compare_samples(mine[was:], others, paired=True)
            if stopped == HOPELESS:
                reason = f"more than {HOPELESS_RATIO:g} times as slow in every round"
                found = msgspec.structs.replace(found, verdict=SLOWER, reason=reason, low=None, high=None)
            if stopped == PLAIN:
                reason = f"less than {PLAIN_RATIO:.0%} of the time in every round"
                found = msgspec.structs.replace(found, verdict=FASTER, reason=reason, low=None, high=None)
            agreed = challenger.gathered.agreed or AgreementResult()
            attempt = self._judged(timed(first, mine[was:], others), before, after, found, agreed)
            self._settle(challenger, attempt.kept)
            if attempt.kept:
                self._crown(first.lever, after)
            return attempt
        except BaseException:
            challenger.worker.close()
            raise

    def _broken(self, first: Attempt, challenger: Contestant) -> Attempt:
        """One of the two ended in the middle of its turns."""
        point = self._let_go(challenger, "interrupted")
        self._dismiss()
        return msgspec.structs.replace(
            first, status=point.status if point.status != OK else "crash", why=point.reason or "the best so far ended"
        )

    def _judged(
        self, first: Attempt, before: Point, after: Point, found: Comparison, agreed: AgreementResult
    ) -> Attempt:
        """Whether it stays: faster or smaller, and right."""
        sizes = (peak_bytes(before.memory), peak_bytes(after.memory))
        kept, why = decide(found, *sizes, self.limit_bytes, steadier=first.lever == "graph")
        off = wrong(agreed.agreement, after.trial.workload.recipe.precision)
        if kept and (agreed.failed or (off and not self.draws)):
            kept, why = False, agreed.failed or off
        if kept and off:
            why = f"{why}; {DRAWS}"
        if kept and agreed.agreement is None:
            why = f"{why}; {UNCHECKED}"
        return msgspec.structs.replace(
            first, comparison=found, before_bytes=sizes[0], after_bytes=sizes[1], agreement=agreed.agreement, kept=kept, why=why,
        )  # fmt: skip

    def _settle(self, challenger: Contestant, kept: bool) -> None:
        """Who lost leaves; its samples are kept."""
        loser, self.resident = (self.resident, challenger) if kept else (challenger, self.resident)
        if loser is not None:
            self._let_go(loser)

    def _crown(self, lever: str, after: Point) -> None:
        self.beaten.append(self.best.trial.workload)
        self.best = after
        self.outlook = self.outlook.after(after)
        if lever in REDONE_BY:  # what failed before may be worth another try
            kept = {(attempt.lever, attempt.name) for attempt in self.attempts if attempt.kept}
            self.tried = {one for one in self.tried if one[0] == lever or one in kept}

    # --- measuring

    def _trial(self, changed: Workload) -> Trial:
        group = f"attempt {len(self.attempts) + 1}" if hasattr(self, "best") else START
        return Trial(workload=changed, sampling=self.sampling, device=self.device, group=group)

    def _measured_alone(self, chosen: Workload, trace: TraceRequest | None = None) -> tuple[Point, AgreementResult]:
        trial, seen = self._trial(chosen), [AgreementResult()]

        def on_event(event: Event) -> None:
            self.progress.event(event)
            seen.extend([event] if isinstance(event, AgreementResult) else [])

        self.progress.trial(trial)
        log, fewest = self.run.log_path(trial.key()), FEWEST if trace is not None else ALONE  # the first is traced
        point = self.worker.run(
            trial, log, on_event, trace=trace, compare=self._compare, fewest=fewest, details=DETAILS
        )
        self._append(point)
        if point.status != OK and trial.group == START:
            if point.status == "interrupted":
                raise KeyboardInterrupt
            if point.status == OOM and self.memory_bytes and not needs_dry_run(chosen):
                return point, seen[-1]
            if trace is not None:  # perhaps it was the profiler that failed
                return self._measured_alone(chosen)
            where = f" ({self.run.path / 'logs'})" if "logs/" in point.hint else ""
            raise FlopwiseError(f"{chosen.label()}: {point.status}: {point.reason}", f"{point.hint}{where}")
        return point, seen[-1]

    def _made_to_fit(self, start: Workload) -> tuple[Point, AgreementResult]:
        """The first step that runs, for one that does not fit; what the closed form says is proved by running it."""
        ran_out = self.best
        for room in FITTING:
            path = to_fit(start, self.look.gpu, room * (self.memory_bytes or 0), keep_exact=self.keep_exact)
            if not path:
                break
            point, agreed = self._measured_alone(path[-1].workload, self.look.request("before"))
            if point.status == OK:
                names = ", ".join(move.name for move in path)
                self._note(f"{start.label()} does not fit ({ran_out.reason}): begun with {names}")
                return point, agreed
        raise FlopwiseError(f"{start.label()}: {ran_out.reason}; no lever makes it fit", ran_out.hint)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.progress.note(text)

    def _worker(self) -> Worker:
        return self.idle.pop() if self.idle else Worker(compiler=True)

    def _let_go(self, one: Contestant, stopped: str = "turns") -> Point:
        point = one.leave(stopped)
        self.idle.append(one.worker)
        self._append(point)
        return point

    def _incumbent(self) -> Contestant:
        """The best so far, running."""
        if self.resident is None or not self.resident.runs:
            trial = msgspec.structs.replace(self.best.trial, group=f"best before attempt {len(self.attempts) + 1}")
            self.resident = Contestant(
                trial, self.run.log_path(trial.key()), self.progress.event, worker=self._worker(), details=DETAILS
            )
            if not self.resident.get_ready():
                ended, self.resident = self.resident.ended, None
                raise FlopwiseError(f"{trial.workload.label()} ran before, and now: {ended.reason}", ended.hint)
        return self.resident

    def _dismiss(self) -> None:
        resident, self.resident = self.resident, None
        if resident is not None:
            self._let_go(resident)

    def _side_by_side(self, move: Move) -> bool:
        """Whether both steps fit the device at once."""
        if self.memory_bytes is None:
            return True
        mine = peak_bytes(self.best.memory) or 0
        return mine + (self.outlook.peak_bytes(move) or mine) < ROOM * self.memory_bytes

    # --- is it right

    def _write_reference(self, start: Workload) -> None:
        """The losses and gradients that every lever's are compared with."""
        reference, most = reference_of(start), self.memory_bytes
        if most and not needs_dry_run(start) and peak_of(reference, self.look.gpu) > most:
            reference = reference_of(start, lighter=True)
            self._note(f"by hand in fp32 it does not fit: the reference is {reference.label()}")
        request = AgreementRequest(path=str(self.reference), write=True)
        try:
            first = self.worker.agree(self._trial(reference), request, self.run.log_path("reference"))
            self.draws = first.draws
            if any(not math.isfinite(x) for x in (*first.losses, first.gradient_error or 0.0)):
                self.no_reference = "the reference's own loss or gradients are not finite: nothing can be checked"
        except FlopwiseError as error:
            self.no_reference = f"no reference to compare with: {error.message}"
        if self.no_reference:
            self._note(self.no_reference)

    @property
    def _compare(self) -> AgreementRequest | None:
        return None if self.no_reference else AgreementRequest(path=str(self.reference))
