"""One process per point: a crash, a hang or an OOM is a row, not the end. No torch here: the worker has it."""

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypedDict, Unpack

import msgspec

from flopwise.capture.functions import refuse_inside_a_step
from flopwise.capture.pipes import GARBLED, GARBLED_HINT, MOST_LINE_BYTES, EventReader, GarbledError
from flopwise.capture.point_builder import PointBuilder, ProcessState, signal_name
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.records.ceilings import Probe
from flopwise.records.events import (
    AgreementRequest,
    AgreementResult,
    DeviceInfo,
    Done,
    DryRunResult,
    Event,
    Exited,
    ExperimentProgress,
    ExperimentRequest,
    MemoryRequest,
    ProbeMeasured,
    Request,
    Started,
    TraceRequest,
    WorkerReady,
)
from flopwise.records.prediction import DryRun
from flopwise.records.run import CRASH, INTERRUPTED, TIMEOUT, UNSUPPORTED, Agreement, Point
from flopwise.scratch import sweep
from flopwise.spec.rank_share import rank_share
from flopwise.spec.workload import Trial, Workload

GRACE_S = 5.0  # between asking a process to stop and ending it
END_S = 20.0  # for the worker's keeper to end what does not end at once
CALIBRATE_S = 900.0
DRY_S = 120.0  # a dry run; the deepest transformers models take a minute
START_S = 120.0  # importing torch from a cold disk

OnEvent = Callable[[Event], None]


class TrialOptions(TypedDict, total=False):
    """What a trial may be asked beyond its samples; see `Request`."""

    turns: bool
    trace: TraceRequest | None
    memory: MemoryRequest | None
    compare: AgreementRequest | None
    fewest: int
    details: int
    watch: bool


def ignore(event: Event) -> None:
    """For whoever does not watch."""


class Worker(AbstractContextManager["Worker"]):
    """A process that has torch loaded and forks for every trial it is given."""

    def __init__(self, compiler: bool = False, wait: bool = True) -> None:
        """`compiler`: load torch.compile's modules as well, which every trial that compiles needs for seconds.

        `wait`: until it is up; else it starts while others work, and is waited for at the first request.
        """
        refuse_inside_a_step()
        sweep()
        self.arguments = ("--compiler",) if compiler else ()
        self._start()
        if wait:
            self._greet()

    def _start(self) -> None:
        command = (sys.executable, "-m", "flopwise.worker", "--owner", str(os.getpid()), *self.arguments)
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        # A session of its own: Ctrl-C reaches this process alone, which then asks the worker to stop in good order.
        self.process = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True
        )
        self._buffer, self._greeted, self._garbled = bytearray(), False, False
        self._reader, self._asked, self._looked = EventReader(""), False, 0

    def _greet(self) -> None:
        self._greeted = True
        hello = next(self._events(time.monotonic() + START_S), None)
        if not isinstance(hello, WorkerReady):
            self.close()
            raise FlopwiseError("the measuring process did not start", f"try: {sys.executable} -m flopwise.worker")
        if hello.error:
            self.close()
            raise FlopwiseError(hello.error, hello.hint)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and all that it has started."""
        self._end_all()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _end_all(self) -> None:
        self.process.terminate()  # its keeper, which ends the others
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def look(self, device: str) -> DeviceInfo:
        """The device, its environment and free memory; raises where there is no such device."""
        answers = self._answers(Request(device=device), f"the device '{device}' could not be opened", START_S)
        return [event for event in answers if isinstance(event, DeviceInfo)][-1]

    def dry_run(self, workload: Workload, gpu: str = "hopper", timeout_s: float = DRY_S) -> DryRun:
        """The workload's step on fake tensors, in a process of its own; raises where that is not possible."""
        run = self.dry_runs([workload], gpu, timeout_s)[0]
        assert run is not None  # else it raised
        return run

    def dry_runs(
        self, workloads: Sequence[Workload], gpu: str = "hopper", timeout_s: float = DRY_S
    ) -> list[DryRun | None]:
        """Several workloads of one target in one process, which imports what they need once.

        Raises where the first is not possible; None for another that is not, or that there was no time for.
        """
        parts = [rank_share(one) for one in workloads]
        request = Request(dry=tuple(msgspec.json.encode(one).decode() for one in parts), architecture=gpu)
        found: list[DryRun | None] = []
        try:
            for event in self._answers(request, f"{workloads[0].target} cannot be dry-run", timeout_s):
                found += [event.run] if isinstance(event, DryRunResult) else []
        except FlopwiseError:
            if not found:
                raise
        return [*found, *[None] * (len(workloads) - len(found))]

    def agree(self, trial: Trial, request: AgreementRequest, log: Path | None = None) -> Agreement:
        """A few steps' losses and gradients compared with the reference's, in a process of its own."""
        asked = Request(trial=msgspec.json.encode(trial).decode(), log=str(log or ""), agree=request)
        answers = self._answers(asked, f"{trial.workload.label()} cannot be checked", trial.sampling.timeout_s)
        return [
            event.agreement for event in answers if isinstance(event, AgreementResult) and event.agreement is not None
        ][-1]

    def calibrate(self, device: str, on_event: OnEvent = ignore, timeout_s: float = CALIBRATE_S) -> list[Probe]:
        """The device's limits, measured in a process of their own."""
        found = []
        for event in self._answers(Request(calibrate=True, device=device), f"{device} cannot be calibrated", timeout_s):
            on_event(event)
            if isinstance(event, ProbeMeasured):
                found.append(event.probe)
        return found

    def _answers(self, request: Request, failure: str, timeout_s: float) -> Iterator[Event]:
        """The events that answer a request, until its process has ended well; raises if it did not."""
        self._send(request)
        process, answered = ProcessState(), False
        try:
            for event in self._events(time.monotonic() + timeout_s):
                process.take(event)
                match event:
                    case Started() | Done():
                        pass
                    case Exited():
                        _raise_if_failed(event, process.done, answered, failure)
                        return
                    case _:
                        answered = True
                        yield event
            if self._garbled:
                raise FlopwiseError(f"{failure}: {GARBLED}", GARBLED_HINT)
            raise FlopwiseError(f"{failure}: no end after {timeout_s:g} s", "try something smaller")
        finally:
            if process.exited is None:  # out of time, or nobody listens any more
                self._end(process, signal.SIGKILL)

    def experiment(
        self,
        asked: ExperimentRequest,
        timeout_s: float,
        log: Path | None = None,
        on_progress: Callable[[ExperimentProgress], None] = ignore,
    ) -> Done:
        """Run an experiment in a process of its own; whatever happens to it, how it ended is returned."""
        self._send(Request(experiment=asked, log=str(log or "")))
        process = ProcessState()

        def on_event(event: Event) -> None:
            if isinstance(event, ExperimentProgress):
                on_progress(event)

        try:
            return self._follow(process, on_event, time.monotonic(), timeout_s)
        except KeyboardInterrupt:
            self._end(process)
            return Done(status=INTERRUPTED, reason="stopped by the user")

    def run(
        self, trial: Trial, log: Path | None = None, on_event: OnEvent = ignore, **asked: Unpack[TrialOptions]
    ) -> Point:
        """Measure one trial. Always returns a point: of an interruption too, with what was measured until then."""
        builder = self.begin(trial, log, **asked)
        try:
            ended = self.follow(builder, on_event)
            if not builder.pid and ended.status == CRASH:  # the worker was gone before the trial began: once more
                builder = self.begin(trial, log, **asked)
                ended = self.follow(builder, on_event)
        except KeyboardInterrupt:
            ended = self.interrupt(builder)
        return builder.finish(ended)

    def begin(
        self, trial: Trial, log: Path | None = None, paired_with: str = "", **asked: Unpack[TrialOptions]
    ) -> PointBuilder:
        """Send the trial to the worker."""
        self._send(Request(trial=msgspec.json.encode(trial).decode(), log=str(log or ""), **asked))
        return PointBuilder(trial, paired_with)

    def follow(
        self, builder: PointBuilder, on_event: OnEvent, until: type[Event] | None = None, since: float | None = None
    ) -> Done:
        """Take events until the trial's process is gone (or one of type `until` has come); say how it ended.

        `since`: from when on the trial's timeout counts; None: from its beginning.
        """
        since = builder.begun if since is None else since
        ended = self._follow(builder, on_event, since, builder.trial.sampling.timeout_s, until)
        if ended.status == TIMEOUT and builder.samples:
            return msgspec.structs.replace(ended, reason=f"{ended.reason}; {len(builder.samples)} samples kept")
        return ended

    def _follow(
        self, process: ProcessState, on_event: OnEvent, since: float, timeout_s: float, until: type[Event] | None = None
    ) -> Done:
        for event in self._events(since + timeout_s):
            process.take(event)
            on_event(event)
            if isinstance(event, Exited):
                return process.outcome()
            if until is not None and isinstance(event, until):
                return Done(status="")
        if self._garbled:
            return Done(status=CRASH, reason=GARBLED, hint=GARBLED_HINT)
        if self.process.poll() is not None:
            return Done(status=CRASH, reason=f"the measuring process ended ({signal_name(-self.process.returncode)})")
        done = process.done
        self._end(process)
        if done is not None:  # what was asked for is there; watching one more step took too long
            return done
        hint = "raise it with --timeout, or make the workload smaller"
        return Done(status=TIMEOUT, reason=f"no end after {timeout_s:g} s", hint=hint, stopped="timeout")

    def interrupt(self, builder: PointBuilder) -> Done:
        """Ask the trial to stop after the step it is in, and end it if it does not."""
        self._end(builder)
        done = builder.done or Done(status="")
        reason = f"after {len(builder.samples)} samples"
        return msgspec.structs.replace(done, status=INTERRUPTED, reason=reason, hint="", stopped=INTERRUPTED)

    def say(self, word: str) -> None:
        """A word to a trial that is interleaved: `go` or `stop`."""
        self._write(f"{word}\n".encode())

    def _end(self, process: ProcessState, *signals: signal.Signals) -> None:
        for sign in signals or (signal.SIGTERM, signal.SIGKILL):
            if not process.pid or process.exited is not None:
                return
            with suppress(ProcessLookupError):
                os.kill(process.pid, sign)
            for event in self._events(time.monotonic() + GRACE_S):
                process.take(event)
                if isinstance(event, Exited):
                    return

    def _send(self, request: Request) -> None:
        """Restarts the worker if it is gone, or if what it was asked before has not ended."""
        if self._asked:
            self.close()
        if self.process.poll() is not None:
            self._start()
        if not self._greeted:
            self._greet()
        request = msgspec.structs.replace(request, key=secrets.token_hex(16))
        self._reader, self._asked = EventReader(request.key), True
        self._write(msgspec.json.encode(request) + b"\n")

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the events say how it ended
            self.process.stdin.write(line)

    def _events(self, deadline: float) -> Iterator[Event]:
        """Events as they come, until the deadline or the worker's end."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while True:
            try:
                while (event := self._next()) is not None:
                    yield event
            except GarbledError:
                self._end_garbled()
                return
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                self.process.wait()
                return
            self._buffer += chunk

    def _next(self) -> Event | None:
        """The next event that is here whole."""
        end = self._buffer.find(b"\n", self._looked)
        if end < 0:
            self._looked = len(self._buffer)
            if self._looked > MOST_LINE_BYTES:
                raise GarbledError
            return None
        event = self._reader.event(bytes(self._buffer[:end]))
        del self._buffer[: end + 1]
        self._looked = 0
        self._asked = self._asked and not isinstance(event, Exited)
        return event

    def _end_garbled(self) -> None:
        """Nothing that a process says can be believed once the step has written among its events."""
        self._garbled, self._asked = True, False
        self._buffer.clear()
        self._end_all()


def _raise_if_failed(ended: Exited, refused: Done | None, answered: bool, failure: str) -> None:
    if refused is not None:
        kind = Unsupported if refused.status == UNSUPPORTED else FlopwiseError
        raise kind(refused.reason, refused.hint)
    if ended.code:
        said = signal_name(-ended.code) if ended.code < 0 else str(ended.code)
        raise FlopwiseError(f"{failure}: its process ended with {said}", "run the step for real")
    if not answered:
        raise FlopwiseError(
            f"{failure}: its process ended with code 0 and no result", "does the step, or its factory, end the process?"
        )
