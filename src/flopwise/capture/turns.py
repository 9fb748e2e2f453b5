"""Two trials in turns, A B B A, so that what drifts, drifts under both; and a trial that stays to meet others."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flopwise.capture.isolate import Worker
from flopwise.capture.stopping import StoppingRule
from flopwise.records.events import AgreementRequest, Done, Event, Sampled, WarmedUp
from flopwise.records.run import INTERRUPTED, STEP, PhaseMemory, Point, Telemetry
from flopwise.spec.workload import Trial

OnEvent = Callable[[Event], None]


class Contestant:
    """A trial in a process of its own that is built, warm, and runs one round whenever it is asked to."""

    def __init__(
        self,
        trial: Trial,
        log: Path | None = None,
        on_event: OnEvent = lambda event: None,
        paired_with: str = "",
        worker: Worker | None = None,
        compare: AgreementRequest | None = None,
        details: int = 0,
    ) -> None:
        """`worker`: one that is there already, and stays. `compare`: with a reference, before it is warm. `details`: of
        so many rounds; 0: of all.
        """
        self.trial, self.on_event, self.lent = trial, on_event, worker is not None
        self.worker = worker or Worker(compiler=trial.workload.recipe.compile != "off")
        self.gathered = self.worker.begin(
            trial, log, turns=True, paired_with=paired_with, compare=compare, details=details
        )
        self.ended = Done(status="")

    @property
    def runs(self) -> bool:
        """Whether it still does."""
        return not self.ended.status

    @property
    def memory(self) -> tuple[PhaseMemory, ...]:
        """Its memory by phase, seen before its first round."""
        return self.gathered.remembered.memory if self.gathered.remembered else ()

    @property
    def telemetry(self) -> Telemetry | None:
        """NVML's readings so far."""
        return self.gathered.watch.telemetry() if self.gathered.watch else None

    def get_ready(self) -> bool:
        """Wait until it is warm; False: it cannot run, and `ended` says why."""
        self.ended = self._wait(WarmedUp)
        return self.runs

    def _wait(self, until: type[Event] | None = None) -> Done:
        """The timeout is that of each wait: how long it has been here, and waited itself, is no fault of its own."""
        return self.worker.follow(self.gathered, self.on_event, until, since=time.monotonic())

    def go(self) -> int:
        """One round; the step's wall time, or 0 if it has ended."""
        self.worker.say("go")
        self.ended = self._wait(Sampled)
        return self.gathered.samples[-1][STEP].wall_ns if self.runs else 0

    def warm_again(self) -> bool:
        """A round that counts as warm-up: after a wait, the first is not like the others."""
        if wall_ns := self.go():
            self.gathered.samples.pop()
            self.gathered.warmup_ns.append(wall_ns)
        return self.runs

    def leave(self, stopped: str = "turns", why: str = "") -> Point:
        """Let it stop and give its point; `why`: it was cut short."""
        if self.runs:
            self.worker.say("stop")
            self.ended = msgspec.structs.replace(self._wait(), stopped=stopped)
            if why:
                self.ended = msgspec.structs.replace(self.ended, status=INTERRUPTED, reason=why)
        if not self.lent:
            self.worker.close()
        return self.gathered.point(self.ended)

    def interrupt(self) -> Point:
        """End it now, and keep what it had measured."""
        self.ended = self.worker.interrupt(self.gathered)
        self.worker.close()
        return self.gathered.point(self.ended)


HOPELESS = "hopeless"  # why turns stopped: the second takes more than twice as long in every round
HOPELESS_ROUNDS, HOPELESS_RATIO = 2, 2.0
PLAIN = "plain"  # or less than two thirds of the time in every round: more rounds would only make the number finer
PLAIN_ROUNDS, PLAIN_RATIO = 4, 2 / 3


def take_turns(first: Contestant, second: Contestant, fewest: int = 0) -> str:
    """Rounds until both are sampled well enough: why it stopped; 'interrupted' if one has ended.

    `fewest`: rounds to be taken whatever the budget says, unless the second is HOPELESS, or the better by far and the
    budget is spent.
    """
    pair = (first, second)
    rules = [StoppingRule(one.trial.sampling) for one in pair]
    begun, order, rounds, worse, better = time.monotonic(), (0, 1), 0, True, True
    while True:
        walls = [0, 0]
        for i in order:
            walls[i] = pair[i].go()
            if not pair[i].runs:
                return "interrupted"
        order = order[::-1]
        elapsed_s = (time.monotonic() - begun) / 2
        verdicts = [rule.after(wall, elapsed_s) for rule, wall in zip(rules, walls, strict=True)]
        rounds += 1
        worse = worse and walls[1] > HOPELESS_RATIO * walls[0]
        better = better and walls[1] < PLAIN_RATIO * walls[0]
        if fewest and worse and rounds >= HOPELESS_ROUNDS:
            return HOPELESS
        if fewest and better and rounds >= PLAIN_ROUNDS and all(verdicts):
            return PLAIN
        if all(verdicts) and rounds >= fewest:
            return verdicts[0]


def run_pair(
    first: Trial,
    second: Trial,
    logs: tuple[Path | None, Path | None] = (None, None),
    on_event: OnEvent = lambda event: None,
) -> tuple[Point, Point]:
    """Measure two trials in turns."""
    a, b = (
        Contestant(trial, log, on_event, paired_with=other.key())
        for trial, other, log in ((first, second, logs[0]), (second, first, logs[1]))
    )
    try:
        ready = [a.get_ready(), b.get_ready()]
        stopped = take_turns(a, b) if all(ready) else "interrupted"
        why = "the other of the two could not run" if stopped == "interrupted" else ""
        return a.leave(stopped, why), b.leave(stopped, why)
    except KeyboardInterrupt:
        return a.interrupt(), b.interrupt()
    finally:
        a.worker.close()
        b.worker.close()
