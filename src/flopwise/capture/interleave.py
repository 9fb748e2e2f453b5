"""Two trials measured against each other: pairs of fresh processes, started alike, their steps run in random order.

Two processes of the same code differ: by the core they run on, their place in memory, when they were started. So a pair of
processes is one observation, and there are several (`statistics.difference_of_pairs`). The two parents of all processes take
turns in having A and B, either is started first by chance, and on a GPU both of a pair run on one and the same core.
"""

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from flopwise.capture.isolate import OnEvent, Worker, ignore
from flopwise.capture.point_builder import PointBuilder, merged
from flopwise.capture.stopping import MUCH_FASTER, MUCH_SLOWER, PairsRule
from flopwise.records.events import AgreementRequest, AgreementResult, Done, Event, PairCompared, Sampled, WarmedUp
from flopwise.records.run import INTERRUPTED, OK, OOM, STEP, Point
from flopwise.spec.workload import Trial
from flopwise.statistics import log_ratio

DETAILED_ROUNDS = 4  # of each process: with phases and GPU time
ONE_CORE = 1.2  # processor time per time, at most: a step whose host side one core can do


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
        watch: bool = False,
    ) -> None:
        """`worker`: one that is running already, and stays. `compare`: with a reference, before it is warm. `details`: of
        so many rounds; 0: of all. `watch`: one more step after them, op by op.
        """
        self.trial, self.lent, self.on_event, self.cores = trial, worker is not None, on_event, 0.0
        self.worker = worker or Worker(compiler=trial.workload.recipe.compile != "off")
        self.builder = self.worker.begin(
            trial, log, turns=True, paired_with=paired_with, compare=compare, details=details, watch=watch
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
        return self.worker.follow(self.builder, self._take, until, since=time.monotonic())

    def _take(self, event: Event) -> None:
        if isinstance(event, WarmedUp):
            self.cores = event.cores
        self.on_event(event)

    @property
    def on_gpu(self) -> bool:
        environment = self.builder.environment
        return environment is not None and environment.gpu is not None

    def round(self) -> int:
        """One round; the step's wall time, or 0 if it has ended."""
        self.worker.say("go")
        self.ended = self._wait(Sampled)
        return self.walls_ns[-1] if self.running else 0

    def pin(self, core: int) -> None:
        """Keep every thread of it on one core, where the system can."""
        with suppress(OSError, AttributeError, ValueError):
            for thread in os.listdir(f"/proc/{self.builder.pid}/task"):
                os.sched_setaffinity(int(thread), {core})

    def stop(self) -> Point:
        """Let it end and give its point."""
        if self.running:
            self.worker.say("stop")
            self.ended = self._wait()
        if not self.lent:
            self.worker.close()
        return self.builder.finish(self.ended)

    def interrupt(self) -> Point:
        """End it now, and keep what it had measured."""
        if self.running:
            self.ended = self.worker.interrupt(self.builder)
        self.worker.close()
        return self.builder.finish(self.ended)


class Contested(msgspec.Struct, frozen=True, kw_only=True):
    """Both points, each with the samples of all its processes, and why sampling stopped."""

    points: tuple[Point, Point]
    stopped: str
    agreed: AgreementResult = AgreementResult()  # of the second, with the reference

    @property
    def failed(self) -> Point | None:
        """The one that could not run; the second, if both could not."""
        return next((point for point in reversed(self.points) if point.status not in (OK, INTERRUPTED)), None)


class _Pair:
    """Two processes, one of each trial, from their start to their end."""

    def __init__(self, begin: Callable[[int], InterleavedTrial], order: Sequence[int], rng: random.Random) -> None:
        """`order`: which of the two is started first."""
        self.begin, self.order, self.random = begin, order, rng
        self.processes: dict[int, InterleavedTrial] = {}
        self.points: dict[int, Point] = {}

    def run_together(self, rule: PairsRule, first_pair: bool) -> str:
        """Both at once, a step of the one beside a step of the other; why all is over, or ''."""
        for i in self.order:
            self.processes[i] = self.begin(i)
        ready = [one.prepare() for one in self.processes.values()]
        stopped = self._rounds(rule, first_pair) if all(ready) else INTERRUPTED
        self.points = {i: one.stop() for i, one in self.processes.items()}
        return stopped

    def _rounds(self, rule: PairsRule, first_pair: bool) -> str:
        a, b = self.processes[0], self.processes[1]
        if a.on_gpu and min(a.cores, b.cores) > 0 and max(a.cores, b.cores) <= ONE_CORE:
            core = self.random.choice(sorted(os.sched_getaffinity(0)))
            a.pin(core)
            b.pin(core)
        rounds = 1
        while len(a.walls_ns) < rounds:
            for one in self.random.sample((a, b), 2):
                if not one.round():
                    return INTERRUPTED
            if first_pair and rule.much_slower(a.walls_ns, b.walls_ns):
                return MUCH_SLOWER
            if rounds == 1:
                rounds = rule.rounds(a.walls_ns[0] + b.walls_ns[0])
        return ""

    def run_in_sequence(self, rule: PairsRule) -> str:
        """One after the other, each with the device to itself; why all is over, or ''."""
        for i in self.order:
            one = self.processes[i] = self.begin(i)
            rounds = 1 if one.prepare() else 0
            while len(one.walls_ns) < rounds and one.round():
                rounds = rounds if rounds > 1 else rule.rounds(2 * one.walls_ns[0])
            complete = one.running
            self.points[i] = one.stop()
            if not complete:
                return INTERRUPTED
        return ""

    def interrupt(self) -> None:
        """End both now, and keep what they had measured."""
        left = {i: one for i, one in self.processes.items() if i not in self.points}
        self.points |= {i: one.interrupt() for i, one in left.items()}


class Contest:
    """Measures pairs of processes until a rule is content. Its two workers stay for the next contest."""

    def __init__(self, log_path: Callable[[str], Path | None], on_event: OnEvent = ignore, watch: bool = False) -> None:
        """`watch`: the first process of each, after its samples, to see what its step does."""
        self.log_path, self.on_event, self.watch = log_path, on_event, watch
        self.workers: list[Worker] = []
        self.random, self.order = random.Random(), [0, 1]

    def start(self, compiler: bool) -> None:
        """The two parents of all processes, both alike; they are waited for when they are needed."""
        if not self.workers:
            self.workers = [Worker(compiler=compiler, wait=False) for _ in range(2)]

    def close(self) -> None:
        """End every process."""
        for worker in self.workers:
            worker.close()
        self.workers.clear()

    def run(
        self,
        trials: tuple[Trial, Trial],
        rule: PairsRule,
        compare: AgreementRequest | None = None,
        together: bool = True,
    ) -> Contested:
        """Pairs of processes until the rule stops it, or one cannot run.

        `compare`: the second's results with a reference. Not `together`: one process after the other, as where both do not
        fit the device; that is also tried where they turn out not to. Ctrl-C keeps what was measured.
        """
        self.start(any(trial.workload.recipe.compile != "off" for trial in trials))
        pairs: list[_Pair] = []
        stopped, agreed, began = "", AgreementResult(), time.monotonic()
        try:
            while not stopped:
                pairs.append(self._pair(trials, len(pairs), compare if not pairs else None))
                stopped = pairs[-1].run_together(rule, len(pairs) == 1) if together else pairs[-1].run_in_sequence(rule)
                if together and len(pairs) == 1 and OOM in {point.status for point in pairs[0].points.values()}:
                    together, stopped = False, ""
                    pairs.clear()
                    continue
                if len(pairs) == 1 and 1 in pairs[0].processes:
                    agreed = pairs[0].processes[1].builder.agreed
                stopped = stopped or self._look(rule, pairs, together, time.monotonic() - began)
        except KeyboardInterrupt:
            for pair in pairs[-1:]:
                pair.interrupt()
            stopped = INTERRUPTED
            self.close()
        points = [_point(i, trials, pairs, stopped, together) for i in (0, 1)]
        return Contested(points=(points[0], points[1]), stopped=stopped, agreed=agreed)

    def _look(self, rule: PairsRule, pairs: Sequence[_Pair], together: bool, elapsed_s: float) -> str:
        """Whether it is decided, and why; '' means go on."""
        if len(pairs) == 1 and rule.much_faster(*(_walls(pairs[0].points[i]) for i in (0, 1))):
            return MUCH_FASTER
        differences = _differences(pairs, together)
        ratio, left_s = math.exp(sum(differences) / len(differences)), rule.left_s(len(differences), elapsed_s)
        self.on_event(PairCompared(pairs=len(differences), ratio=ratio, left_s=left_s))
        return rule.after(differences, elapsed_s)

    def _pair(self, trials: tuple[Trial, Trial], number: int, compare: AgreementRequest | None) -> _Pair:
        """The workers take turns in having A and B: what is peculiar to one of them is no difference of the two."""
        workers = self.workers if number % 2 == 0 else self.workers[::-1]

        def begin(i: int) -> InterleavedTrial:
            log, other = self.log_path(trials[i].key()), trials[1 - i].key()
            asked = compare if i == 1 else None
            watch = self.watch and number == 0
            return InterleavedTrial(trials[i], log, self.on_event, other, workers[i], asked, DETAILED_ROUNDS, watch)

        # Which is started first matters: of two pairs in a row, either is once.
        self.order = self.order[::-1] if number % 2 else self.random.sample((0, 1), 2)
        return _Pair(begin, self.order, self.random)


def _differences(pairs: Sequence[_Pair], together: bool) -> list[float]:
    walls = [[_walls(pair.points[i]) for i in (0, 1)] for pair in pairs]
    return [log_ratio(a, b, together) for a, b in walls]


def _walls(point: Point) -> tuple[int, ...]:
    times = point.times()
    return times.wall_ns if times else ()


def _point(i: int, trials: tuple[Trial, Trial], pairs: Sequence[_Pair], stopped: str, together: bool) -> Point:
    """All processes of one trial as one point: with the status of the one that could not run, if there is one."""
    points = [pair.points[i] for pair in pairs if i in pair.points]
    if not points:  # the other could not run, and this one was not begun
        points = [PointBuilder(trials[i], trials[1 - i].key()).point(Done(status=INTERRUPTED))]
    ended = next((point for point in points if point.status not in (OK, INTERRUPTED)), points[-1])
    done = Done(status=ended.status, reason=ended.reason, hint=ended.hint, levers=ended.levers, stopped=stopped)
    if stopped == INTERRUPTED and ended.status in (OK, INTERRUPTED):
        others = [pair.points[1 - i].status for pair in pairs if 1 - i in pair.points]
        cut = any(status not in (OK, INTERRUPTED) for status in others)
        taken = sum(len(_walls(point)) for point in points)
        why = "the other of the two could not run" if cut else f"after {taken} samples"
        done = Done(status=INTERRUPTED, reason=why, stopped=stopped)
    return msgspec.structs.replace(merged(points, done), together=together)
