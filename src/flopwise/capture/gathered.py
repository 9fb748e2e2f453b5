"""What a worker's process says, folded into a point: whatever was said before a crash is kept."""

import signal
import time
from datetime import UTC, datetime
from pathlib import Path

from flopwise.capture.telemetry import Watch
from flopwise.errors import one_line
from flopwise.records.events import (
    AgreementResult,
    DeviceInfo,
    Done,
    Event,
    Exited,
    MemoryMeasured,
    PhaseSample,
    Sampled,
    SnapshotWritten,
    Started,
    StepBuilt,
    TraceWritten,
    WarmedUp,
    WarmupStep,
)  # fmt: skip
from flopwise.records.run import CRASH, STEP, Environment, PhaseTimes, Point
from flopwise.spec.workload import Trial


class Followed:
    """A worker's process from its start to its end: its id, its last words, its exit."""

    def __init__(self) -> None:
        self.pid = 0
        self.done: Done | None = None
        self.exited: Exited | None = None

    def take(self, event: Event) -> None:
        match event:
            case Started():
                self.pid = event.pid
            case Done():
                self.done = event
            case Exited():
                self.exited = event
            case _:
                pass


class Gathered(Followed):
    """Folds a trial's events into its point. Whatever was said before a crash is kept."""

    def __init__(self, trial: Trial, paired_with: str = "") -> None:
        super().__init__()
        self.trial, self.paired_with = trial, paired_with
        self.started_at, self.begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        self.environment: Environment | None = None
        self.ready: StepBuilt | None = None
        self.warmup_ns: list[int] = []
        self.warmup_rule = ""
        self.samples: list[dict[str, PhaseSample]] = []
        self.remembered: MemoryMeasured | None = None
        self.traced: TraceWritten | None = None
        self.recorded: SnapshotWritten | None = None
        self.agreed: AgreementResult | None = None
        self.watch: Watch | None = None

    def take(self, event: Event) -> None:
        super().take(event)
        match event:
            case DeviceInfo():
                self.environment = event.environment
                self.watch = Watch(event.gpu_uuid).__enter__()
            case StepBuilt():
                self.ready = event
            case WarmupStep():
                self.warmup_ns.append(event.wall_ns)
            case WarmedUp():
                self.warmup_rule = event.rule
            case Sampled():
                self.samples.append(event.phases)
            case MemoryMeasured():
                self.remembered = event
            case TraceWritten():
                self.traced = event
            case SnapshotWritten():
                self.recorded = event
            case AgreementResult():
                self.agreed = event
            case _:
                pass

    def times(self) -> tuple[PhaseTimes, ...]:
        """Every sample so far."""
        return _phases(self.samples)

    def point(self, ended: Done) -> Point:
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
        return Point(
            key=self.trial.key(),
            trial=self.trial,
            status=ended.status,
            reason=ended.reason,
            hint=ended.hint,
            phases=self.times(),
            warmup_ns=tuple(self.warmup_ns),
            warmup_rule=self.warmup_rule,
            setup_ns=self.ready.setup_ns if self.ready else 0,
            captured_first_ns=self.ready.captured_first_ns if self.ready else 0,
            stopped=ended.stopped,
            memory=self.remembered.memory if self.remembered else (),
            peak_rss_bytes=ended.peak_rss_bytes,
            ran=ended.ran,
            telemetry=self.watch.telemetry() if self.watch else None,
            environment=self.environment,
            paired_with=self.paired_with,
            trace_file=Path(self.traced.path).name if self.traced else "",
            traced_step_ns=self.traced.step_ns if self.traced else 0,
            memory_file=Path(self.recorded.path).name if self.recorded else "",
            started_at=self.started_at,
            elapsed_s=round(time.monotonic() - self.begun, 3),
        )


def _phases(samples: list[dict[str, PhaseSample]]) -> tuple[PhaseTimes, ...]:
    if not samples:
        return ()
    has_gpu = samples[0][STEP].gpu_ns is not None
    return tuple(
        PhaseTimes(
            phase=phase,
            wall_ns=tuple(s.wall_ns for s in taken),
            launch_ns=tuple(s.launch_ns or 0 for s in taken) if has_gpu else (),
            gpu_ns=tuple(s.gpu_ns for s in taken if s.gpu_ns is not None),
            gpu_held=tuple(s.held for s in taken if s.gpu_ns is not None),
        )
        for phase in samples[0]
        if (taken := [sample[phase] for sample in samples if phase in sample])
    )


def ended(gathered: Followed) -> Done:
    """How a process ended, from its last words and its exit code."""
    if gathered.done is not None:
        return gathered.done
    code = gathered.exited.code if gathered.exited else 1
    if code < 0:
        likely = ": most likely the system ran out of memory" if -code == signal.SIGKILL else ""
        return Done(
            status=CRASH,
            reason=f"the process was ended by {signal_name(-code)}{likely}",
            hint="the run's logs/ folder has its last words",
        )
    return Done(
        status=CRASH,
        reason=f"the process ended with code {code} and no result",
        hint="the run's logs/ folder has its last words",
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return one_line(f"code {-number}")
