"""What a worker's process reports, folded into a point: whatever came before a crash is kept."""

import itertools
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from flopwise.capture.pipes import CLOSED, CLOSED_HINT, PIPE_LOST
from flopwise.capture.telemetry import Watch
from flopwise.records import events
from flopwise.records.events import Done, Event, Exited, PhaseSample, Started
from flopwise.records.possible import impossible
from flopwise.records.run import CRASH, STEP, Environment, PhaseTimes, Point, Ran, RankRow, Telemetry
from flopwise.redact import redacted_line
from flopwise.spec.workload import Trial


class ProcessState:
    """A worker's process from its start to its end: its id, its last report, its exit."""

    def __init__(self) -> None:
        self.pid = 0
        self.begun = time.monotonic()
        self.done: Done | None = None
        self.exited: Exited | None = None

    def take(self, event: Event) -> None:
        match event:
            case Started():
                self.pid = event.pid
            case Done():
                self.done = msgspec.structs.replace(event, reason=redacted_line(event.reason))
            case Exited():
                self.exited = event
            case _:
                pass

    def outcome(self) -> Done:
        """How it ended, from its last report and its exit code."""
        if self.done is not None:
            return self.done
        code = self.exited.code if self.exited else 1
        if code == PIPE_LOST:
            return Done(status=CRASH, reason=CLOSED, hint=CLOSED_HINT)
        reason = f"the process ended with code {code} and no result"
        if code < 0:
            likely = ": most likely the system ran out of memory" if -code == signal.SIGKILL else ""
            reason = f"the process was ended by {signal_name(-code)}{likely}"
        return Done(status=CRASH, reason=reason, hint="the run's logs/ folder has its output")


class PointBuilder(ProcessState):
    """Folds a trial's events into its point."""

    def __init__(self, trial: Trial, paired_with: str = "") -> None:
        super().__init__()
        self.trial, self.paired_with = trial, paired_with
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.environment: Environment | None = None
        self.ready = events.StepBuilt(setup_ns=0)
        self.warmup_ns: list[int] = []
        self.warmup_rule, self.clock_ns = "", 0
        self.samples: list[dict[str, PhaseSample]] = []
        self.memory = events.MemoryMeasured(memory=())
        self.traced = events.TraceWritten(path="", step_ns=0)
        self.recorded = events.SnapshotWritten(path="")
        self.agreed = events.AgreementResult()
        self.ranks = events.RanksMeasured(ranks=())
        self.watch: Watch | None = None

    def take(self, event: Event) -> None:
        super().take(event)
        match event:
            case events.DeviceInfo():
                self.environment = event.environment
                self.watch = Watch(event.gpu_uuid).__enter__()
            case events.StepBuilt():
                self.ready = event
            case events.WarmupStep():
                self.warmup_ns.append(event.wall_ns)
            case events.WarmedUp():
                self.warmup_rule, self.clock_ns = event.rule, event.clock_ns
            case events.Sampled():
                self.samples.append(event.phases)
            case events.MemoryMeasured():
                self.memory = event
            case events.TraceWritten():
                self.traced = event
            case events.SnapshotWritten():
                self.recorded = event
            case events.AgreementResult():
                self.agreed = event
            case events.RanksMeasured():
                self.ranks = event
            case _:
                pass

    def finish(self, ended: Done) -> Point:
        """The point; telemetry is read no more."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
        return self.point(ended)

    def point(self, ended: Done) -> Point:
        """What was measured so far; nothing of it where a number is one that no clock can show."""
        found = self._measured(ended)
        if odd := impossible(found):
            hint = "a step that replaces time.perf_counter_ns, or another clock, cannot be measured"
            reason = f"{odd} is impossible: the clocks were changed"
            found = Point(
                key=found.key, trial=self.trial, status=CRASH, reason=reason, hint=hint, started_at=self.started_at
            )
        return found

    def _measured(self, ended: Done) -> Point:
        return Point(
            key=self.trial.key(),
            trial=self.trial,
            status=ended.status,
            reason=redacted_line(ended.reason),
            hint=ended.hint,
            levers=ended.levers,
            phases=_slowest(_phases(self.samples), self.ranks.ranks),
            warmup_ns=tuple(self.warmup_ns),
            clock_ns=self.clock_ns,
            warmup_rule=self.warmup_rule,
            setup_ns=self.ready.setup_ns,
            captured_first_ns=self.ready.captured_first_ns,
            stopped=ended.stopped,
            memory=self.memory.memory,
            peak_rss_bytes=ended.peak_rss_bytes,
            ran=ended.ran,
            telemetry=self.watch.telemetry() if self.watch else None,
            environment=self.environment,
            paired_with=self.paired_with,
            trace_file=Path(self.traced.path).name,
            traced_step_ns=self.traced.step_ns,
            memory_file=Path(self.recorded.path).name,
            ranks=self.ranks.ranks,
            started_at=self.started_at,
            elapsed_s=round(time.monotonic() - self.begun, 3),
        )


def _phases(samples: Sequence[dict[str, PhaseSample]]) -> tuple[PhaseTimes, ...]:
    """Every sample of each phase; later rounds may hold the step alone."""
    if not samples:
        return ()
    has_gpu = samples[0][STEP].gpu_ns is not None
    rounds = {phase: [sample[phase] for sample in samples if phase in sample] for phase in samples[0]}
    return tuple(_times(phase, taken, has_gpu) for phase, taken in rounds.items())


def _slowest(phases: tuple[PhaseTimes, ...], ranks: Sequence[RankRow]) -> tuple[PhaseTimes, ...]:
    """A step that several ranks share ends when the last of them is done."""
    walls = [row.wall_ns for row in ranks]
    if not phases or not walls or any(len(one) != len(phases[0].wall_ns) for one in walls):
        return phases
    last = tuple(max(each) for each in zip(*walls, strict=True))
    return (msgspec.structs.replace(phases[0], wall_ns=last), *phases[1:])


def _times(phase: str, rounds: Sequence[PhaseSample], has_gpu: bool) -> PhaseTimes:
    on_gpu = [(sample.gpu_ns, sample.held) for sample in rounds if sample.gpu_ns is not None]
    return PhaseTimes(
        phase=phase,
        wall_ns=tuple(sample.wall_ns for sample in rounds),
        launch_ns=tuple(sample.launch_ns or 0 for sample in rounds) if has_gpu else (),
        gpu_ns=tuple(ns for ns, _ in on_gpu),
        gpu_held=tuple(held for _, held in on_gpu),
    )


def merged(points: Sequence[Point], ended: Done) -> Point:
    """The points of one trial's processes as one; what is not of samples is the first's, how it ended is given."""
    first, phases = points[0], dict.fromkeys(times.phase for point in points for times in point.phases)
    return msgspec.structs.replace(
        first,
        status=ended.status,
        reason=redacted_line(ended.reason),
        hint=ended.hint,
        levers=ended.levers,
        stopped=ended.stopped,
        phases=tuple(_merged_times([t for p in points if (t := p.times(phase)) is not None]) for phase in phases),
        memory=next((point.memory for point in points if point.memory), ()),
        ran=_merged_ran([point.ran for point in points if point.ran is not None]),
        peak_rss_bytes=max(point.peak_rss_bytes for point in points),
        telemetry=_merged_telemetry([point.telemetry for point in points if point.telemetry is not None]),
        elapsed_s=round(sum(point.elapsed_s for point in points), 3),
    )


def _merged_ran(ran: Sequence[Ran]) -> Ran | None:
    """Of the process that watched the step; else of the last."""
    watched = [one for one in ran if one.seen is not None]
    return next(reversed(watched or ran), None)


def _merged_times(times: Sequence[PhaseTimes]) -> PhaseTimes:
    return PhaseTimes(
        phase=times[0].phase,
        wall_ns=tuple(ns for one in times for ns in one.wall_ns),
        launch_ns=tuple(ns for one in times for ns in one.launch_ns),
        gpu_ns=tuple(ns for one in times for ns in one.gpu_ns),
        gpu_held=tuple(held for one in times for held in one.gpu_held),
        processes=tuple(len(one.wall_ns) for one in times),
        gpu_processes=tuple(len(one.gpu_ns) for one in times if one.gpu_ns),
    )


def _merged_telemetry(parts: Sequence[Telemetry]) -> Telemetry | None:
    """Tick after tick, whichever process ran; every reason for a lower clock once."""
    fields = [field for field in Telemetry.__struct_fields__ if field != "throttle"]
    joined = {field: tuple(itertools.chain.from_iterable(getattr(part, field) for part in parts)) for field in fields}
    throttle = tuple(dict.fromkeys(reason for part in parts for reason in part.throttle))
    return Telemetry(**joined, throttle=throttle) if parts else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"code {-number}"
