"""Two trials run interleaved, A B B A, so that drift affects both alike; and a best one that stays for several challengers."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flopwise.capture.isolate import OnEvent, Worker, ignore
from flopwise.capture.stopping import StoppingRule
from flopwise.errors import FlopwiseError
from flopwise.records.events import AgreementRequest, AgreementResult, Done, Event, Sampled, WarmedUp
from flopwise.records.run import CRASH, INTERRUPTED, OK, STEP, PhaseMemory, Point
from flopwise.spec.workload import Sampling, Trial

# Why rounds ended early, every one of them saying the same: more would only make the number finer.
MUCH_SLOWER, MUCH_SLOWER_ROUNDS, MUCH_SLOWER_RATIO = "much_slower", 2, 2.0
MUCH_FASTER, MUCH_FASTER_ROUNDS, MUCH_FASTER_RATIO = "much_faster", 4, 2 / 3


class InterleavedTrial:
    """A trial in a process of its own that is built, warm, and runs one round whenever it is asked to."""

    def __init__(
        self,
        trial: Trial,
        log: Path | None = None,
        on_event: OnEvent = ignore,
        paired_with: str = "",
        worker: Worker | None = None,
        compare: AgreementRequest | None = None,
        details: int = 0,
    ) -> None:
        """`worker`: one that is running already, and stays. `compare`: with a reference, before it is warm. `details`: of
        so many rounds; 0: of all.
        """
        self.trial, self.on_event, self.lent = trial, on_event, worker is not None
        self.worker = worker or Worker(compiler=trial.workload.recipe.compile != "off")
        self.builder = self.worker.begin(
            trial, log, turns=True, paired_with=paired_with, compare=compare, details=details
        )
        self.ended = Done(status="")

    @property
    def running(self) -> bool:
        return not self.ended.status

    @property
    def walls_ns(self) -> list[int]:
        """The step's wall time in every round."""
        return [sample[STEP].wall_ns for sample in self.builder.samples]

    def prepare(self) -> bool:
        """Wait until it is warm; False: it cannot run, and `ended` says why."""
        self.ended = self._wait(WarmedUp)
        return self.running

    def _wait(self, until: type[Event] | None = None) -> Done:
        """The timeout is that of each wait: how long it has been here, and waited itself, does not count."""
        return self.worker.follow(self.builder, self.on_event, until, since=time.monotonic())

    def round(self) -> int:
        """One round; the step's wall time, or 0 if it has ended."""
        self.worker.say("go")
        self.ended = self._wait(Sampled)
        return self.walls_ns[-1] if self.running else 0

    def warm_up(self) -> bool:
        """A round that does not count: after a wait, the first is not like the others."""
        if wall_ns := self.round():
            self.builder.samples.pop()
            self.builder.warmup_ns.append(wall_ns)
        return self.running

    def stop(self, stopped: str = "turns", why: str = "") -> Point:
        """Let it end and give its point; `why`: it was cut short."""
        if self.running:
            self.worker.say("stop")
            self.ended = msgspec.structs.replace(self._wait(), stopped=stopped)
            if why:
                self.ended = msgspec.structs.replace(self.ended, status=INTERRUPTED, reason=why)
        if not self.lent:
            self.worker.close()
        return self.builder.finish(self.ended)

    def interrupt(self) -> Point:
        """End it now, and keep what it had measured."""
        self.ended = self.worker.interrupt(self.builder)
        self.worker.close()
        return self.builder.finish(self.ended)


class RoundsRule:
    """After every round of two trials: whether to stop, and why; '' means go on.

    `fewest`: rounds to take whatever the budget, unless the second is much slower, or much faster and the budget spent.
    """

    def __init__(self, samplings: tuple[Sampling, Sampling], fewest: int = 0) -> None:
        self.rules, self.fewest = [StoppingRule(sampling) for sampling in samplings], fewest
        self.rounds, self.all_slower, self.all_faster = 0, True, True

    def after(self, walls_ns: tuple[int, int], elapsed_s: float) -> str:
        first, second = walls_ns
        verdicts = [rule.after(wall, elapsed_s) for rule, wall in zip(self.rules, walls_ns, strict=True)]
        self.rounds += 1
        self.all_slower &= second > MUCH_SLOWER_RATIO * first
        self.all_faster &= second < MUCH_FASTER_RATIO * first
        if self.fewest and self.all_slower and self.rounds >= MUCH_SLOWER_ROUNDS:
            return MUCH_SLOWER
        if not all(verdicts):
            return ""
        if self.fewest and self.all_faster and self.rounds >= MUCH_FASTER_ROUNDS:
            return MUCH_FASTER
        return verdicts[0] if self.rounds >= self.fewest else ""


def interleave(first: InterleavedTrial, second: InterleavedTrial, fewest: int = 0) -> str:
    """Rounds until both are sampled well enough: why it stopped; INTERRUPTED if one of them has ended."""
    rule, began = RoundsRule((first.trial.sampling, second.trial.sampling), fewest), time.monotonic()
    pair, order, walls_ns = (first, second), (0, 1), [0, 0]
    while True:
        for i in order:
            walls_ns[i] = pair[i].round()
            if not pair[i].running:
                return INTERRUPTED
        order = order[::-1]
        if stopped := rule.after((walls_ns[0], walls_ns[1]), (time.monotonic() - began) / 2):
            return stopped


def run_pair(
    first: Trial, second: Trial, logs: tuple[Path | None, Path | None] = (None, None), on_event: OnEvent = ignore
) -> tuple[Point, Point]:
    """Measure two trials interleaved. Always returns points: of an interruption too, with what was measured until then."""
    a, b = (
        InterleavedTrial(trial, log, on_event, paired_with=other.key())
        for trial, other, log in ((first, second, logs[0]), (second, first, logs[1]))
    )
    try:
        ready = [a.prepare(), b.prepare()]
        stopped = interleave(a, b) if all(ready) else INTERRUPTED
        why = "the other of the two could not run" if stopped == INTERRUPTED else ""
        return a.stop(stopped, why), b.stop(stopped, why)
    except KeyboardInterrupt:
        return a.interrupt(), b.interrupt()
    finally:
        a.worker.close()
        b.worker.close()


class PairMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """A challenger's point, with the samples that the best step took interleaved with it; `crash`, too, if the best ended."""

    point: Point
    best_ns: tuple[int, ...] = ()
    best_memory: tuple[PhaseMemory, ...] = ()
    stopped: str = ""  # why the rounds ended
    agreed: AgreementResult = AgreementResult()


class Contest:
    """Keeps the best step's process running while challengers come and go. Workers are reused: loading torch takes seconds."""

    best: InterleavedTrial | None = None
    challenger: InterleavedTrial | None = None
    earlier_rounds = 0  # of the best, with other challengers

    def __init__(
        self, log_path: Callable[[str], Path], on_event: OnEvent, on_point: Callable[[Point], None], details: int = 0
    ) -> None:
        """`on_point` gets the point of every trial that leaves. `details`: of so many rounds."""
        self.log_path, self.on_event, self.on_point, self.details = log_path, on_event, on_point, details
        self.idle: list[Worker] = []

    def challenge(self, best: Trial, challenger: Trial, compare: AgreementRequest | None, rounds: int) -> PairMeasured:
        """Start a challenger, and the best if it is not running; run both interleaved."""
        if self.best is None or not self.best.running:
            self.best = self._start(best)
            if not self.best.prepare():
                ended = self.best.ended
                raise FlopwiseError(f"{best.workload.label()} ran before, and now: {ended.reason}", ended.hint)
        self.challenger = self._start(challenger, self.best.trial.key(), compare)
        ready = self.challenger.prepare() and self.best.warm_up() and self.challenger.warm_up()
        self.earlier_rounds = len(self.best.walls_ns)
        return self.more(rounds if ready else 0)

    def more(self, rounds: int) -> PairMeasured:
        """At least so many rounds of the two that are running; 0: one of them has ended already."""
        best, challenger = self.best, self.challenger
        assert best is not None
        assert challenger is not None
        stopped = interleave(best, challenger, fewest=rounds) if rounds else INTERRUPTED
        ended = challenger.ended if not challenger.running else Done(status=OK)
        if not best.running:
            ended = Done(status=CRASH, reason=best.ended.reason or "the best step's process ended")
        return PairMeasured(
            point=challenger.builder.point(ended),
            best_ns=tuple(best.walls_ns[self.earlier_rounds :]),
            best_memory=best.builder.memory.memory,
            stopped=stopped,
            agreed=challenger.builder.agreed,
        )

    def settle(self, best: str) -> None:
        """Of a pair, the trial whose key is `best` stays and the other leaves."""
        loser, self.challenger = self.challenger, None
        if loser is not None and loser.trial.key() == best:
            loser, self.best = self.best, loser
        self._let_go(loser)
        if self.best is not None and not self.best.running:
            self.dismiss()

    def dismiss(self) -> None:
        """Let the best step's process end, so that nothing else is on the device."""
        best, self.best = self.best, None
        self._let_go(best)

    def interrupt(self) -> None:
        """End both at once; what they had measured is kept."""
        for one in (self.challenger, self.best):
            if one is not None:
                self.on_point(one.interrupt())
        self.challenger = self.best = None

    def close(self) -> None:
        """End every process."""
        for worker in (*self.idle, *(one.worker for one in (self.best, self.challenger) if one is not None)):
            worker.close()

    def _start(self, trial: Trial, paired_with: str = "", compare: AgreementRequest | None = None) -> InterleavedTrial:
        worker = self.idle.pop() if self.idle else Worker(compiler=trial.workload.recipe.compile != "off")
        log = self.log_path(trial.key())
        return InterleavedTrial(trial, log, self.on_event, paired_with, worker, compare, self.details)

    def _let_go(self, one: InterleavedTrial | None) -> None:
        if one is not None:
            self.on_point(one.stop())
            self.idle.append(one.worker)
