"""One process per point: a crash, a hang or an OOM is a row, not the end. No torch here: the worker has it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from flopwise.capture.gathered import Followed, Gathered, ended, signal_name
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.records.ceilings import Probe
from flopwise.records.dry_run import DryRun
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
)  # fmt: skip
from flopwise.records.run import CRASH, INTERRUPTED, TIMEOUT, UNSUPPORTED, Agreement, Environment, Point
from flopwise.spec.workload import Trial, Workload

GRACE_S = 5.0  # between asking a process to stop and ending it
CALIBRATE_S = 900.0
DRY_S = 120.0  # a dry run; the deepest models of others take a minute
START_S = 120.0  # importing torch from a cold disk

OnEvent = Callable[[Event], None]


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


class Worker(AbstractContextManager["Worker"]):
    """A process that has torch loaded and forks for every trial it is given."""

    def __init__(self, compiler: bool = False, wait: bool = True) -> None:
        """`compiler`: load torch.compile's modules as well, which every trial that compiles needs for seconds.

        `wait`: until it is up; else it gets ready while others work, and is waited for when it is first asked something.
        """
        self.arguments = ("--compiler",) if compiler else ()
        self._start()
        if wait:
            self._greet()

    def _start(self) -> None:
        # A session of its own: Ctrl-C reaches this process alone, which then asks the worker to stop in good order.
        self.process = subprocess.Popen(
            (sys.executable, "-m", "flopwise.worker", *self.arguments),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self._buffer, self._greeted = b"", False

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
        """End the worker and whatever it is running."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()

    def surroundings(self, device: str) -> tuple[Environment, str]:
        """The environment and the device that `device` resolves to; raises where there is no such device."""
        found = self.look(device)
        return found.environment, found.device

    def look(self, device: str) -> DeviceInfo:
        """All there is to say about a device, its free memory too; raises where there is no such device."""
        self._send(Request(device=device))
        found: DeviceInfo | None = None
        refused: Done | None = None
        for event in self._events(time.monotonic() + START_S):
            match event:
                case DeviceInfo():
                    found = event
                case Done():
                    refused = event
                case Exited():
                    break
                case _:
                    pass
        if refused is not None:
            raise FlopwiseError(refused.reason, refused.hint)
        if found is None:
            raise FlopwiseError(f"the device '{device}' could not be opened", "see `flopwise doctor`")
        return found

    def dry_run(self, workload: Workload, gpu: str = "hopper", timeout_s: float = DRY_S) -> DryRun:
        """The workload's step on fake tensors, in a process of its own; raises where it cannot be told."""
        request = Request(dry=msgspec.json.encode(workload).decode(), architecture=gpu)
        answers = self._answers(request, f"{workload.target} cannot be dry-run", timeout_s)
        return [event.run for event in answers if isinstance(event, DryRunResult)][-1]

    def agree(self, trial: Trial, request: AgreementRequest, log: Path | None = None) -> Agreement:
        """A few steps' losses and gradients beside the reference's, in a process of its own."""
        asked = Request(trial=msgspec.json.encode(trial).decode(), log=str(log or ""), agree=request)
        answers = self._answers(asked, f"{trial.workload.label()} cannot be checked", trial.sampling.timeout_s)
        return [
            event.agreement for event in answers if isinstance(event, AgreementResult) and event.agreement is not None
        ][-1]

    def calibrate(
        self, device: str, on_event: OnEvent = lambda event: None, timeout_s: float = CALIBRATE_S
    ) -> list[Probe]:
        """The device's limits, measured in a process of their own."""
        found = []
        for event in self._answers(Request(calibrate=True, device=device), f"{device} cannot be calibrated", timeout_s):
            on_event(event)
            if isinstance(event, ProbeMeasured):
                found.append(event.probe)
        return found

    def _answers(self, request: Request, failure: str, timeout_s: float) -> Iterator[Event]:
        """The events that answer a request, until its process has ended well; raises if it did not."""
        if self.process.poll() is not None:
            self._start()
        self._send(request)
        pid, refused, answered = 0, None, False
        try:
            for event in self._events(time.monotonic() + timeout_s):
                match event:
                    case Started():
                        pid = event.pid
                    case Done():
                        refused = event
                    case Exited():
                        pid = 0
                        _raise_if_failed(event, refused, answered, failure)
                        return
                    case _:
                        answered = True
                        yield event
            raise FlopwiseError(f"{failure}: no end after {timeout_s:g} s", "try something smaller")
        finally:
            if pid:  # it is still there: out of time, or nobody listens any more
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                any(isinstance(event, Exited) for event in self._events(time.monotonic() + GRACE_S))

    def experiment(
        self,
        asked: ExperimentRequest,
        timeout_s: float,
        log: Path | None = None,
        on_told: Callable[[ExperimentProgress], None] = lambda told: None,
    ) -> Done:
        """Run an experiment in a process of its own; whatever happens to it, how it ended is returned."""
        if self.process.poll() is not None:
            self._start()
        self._send(Request(experiment=asked, log=str(log or "")))
        followed, deadline = Followed(), time.monotonic() + timeout_s
        try:
            for event in self._events(deadline):
                followed.take(event)
                if isinstance(event, ExperimentProgress):
                    on_told(event)
                if isinstance(event, Exited):
                    return ended(followed)
        except KeyboardInterrupt:
            self._end(followed)
            return Done(status=INTERRUPTED, reason="stopped by the user")
        if self.process.poll() is not None:
            return Done(status=CRASH, reason=f"the measuring process ended ({signal_name(-self.process.returncode)})")
        self._end(followed)
        return Done(status=TIMEOUT, reason=f"no end after {timeout_s:g} s", hint="raise it with --timeout")

    def run(
        self,
        trial: Trial,
        log: Path | None = None,
        on_event: OnEvent = lambda event: None,
        trace: TraceRequest | None = None,
        memory: MemoryRequest | None = None,
        compare: AgreementRequest | None = None,
        fewest: int = 0,
        details: int = 0,
    ) -> Point:
        """Measure one trial. Always returns a point: of an interruption too, with what was measured until then."""
        gathered = self.begin(trial, log, trace=trace, memory=memory, compare=compare, fewest=fewest, details=details)
        try:
            ended = self.follow(gathered, on_event)
        except KeyboardInterrupt:
            ended = self.interrupt(gathered)
        return gathered.point(ended)

    def begin(
        self,
        trial: Trial,
        log: Path | None = None,
        turns: bool = False,
        paired_with: str = "",
        trace: TraceRequest | None = None,
        memory: MemoryRequest | None = None,
        compare: AgreementRequest | None = None,
        fewest: int = 0,
        details: int = 0,
    ) -> Gathered:
        """Send the trial to the worker, starting the worker anew if it is gone."""
        if self.process.poll() is not None:
            self._start()
        plan = msgspec.json.encode(trial).decode()
        self._send(
            Request(
                trial=plan,
                log=str(log or ""),
                turns=turns,
                trace=trace,
                memory=memory,
                compare=compare,
                fewest=fewest,
                details=details,
            )
        )
        return Gathered(trial, paired_with)

    def follow(
        self, gathered: Gathered, on_event: OnEvent, until: type[Event] | None = None, since: float | None = None
    ) -> Done:
        """Take events until the trial's process is gone (or one of type `until` has come); say how it ended.

        `since`: from when on the trial's timeout counts; None: from its beginning.
        """
        timeout_s = gathered.trial.sampling.timeout_s
        for event in self._events((gathered.begun if since is None else since) + timeout_s):
            gathered.take(event)
            on_event(event)
            if isinstance(event, Exited):
                return ended(gathered)
            if until is not None and isinstance(event, until):
                return Done(status="")
        if self.process.poll() is not None:
            return Done(status=CRASH, reason=f"the measuring process ended ({signal_name(-self.process.returncode)})")
        self._end(gathered)
        kept = f"; {len(gathered.samples)} samples kept" if gathered.samples else ""
        return Done(
            status=TIMEOUT,
            reason=f"no end after {timeout_s:g} s{kept}",
            hint="raise it with --timeout, or make the workload smaller",
            stopped="timeout",
        )

    def interrupt(self, gathered: Gathered) -> Done:
        """Ask the trial to stop after the step it is in, and end it if it does not."""
        self._end(gathered)
        done = gathered.done
        stopped = Done(status=INTERRUPTED, reason=f"after {len(gathered.samples)} samples", stopped="interrupted")
        return msgspec.structs.replace(stopped, ran=done.ran, peak_rss_bytes=done.peak_rss_bytes) if done else stopped

    def say(self, word: str) -> None:
        """A word to a trial that takes turns: `go` or `stop`."""
        self._write(f"{word}\n".encode())

    def _end(self, gathered: Followed) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if not gathered.pid or gathered.exited is not None:
                return
            with suppress(ProcessLookupError):
                os.kill(gathered.pid, sign)
            for event in self._events(time.monotonic() + GRACE_S):
                gathered.take(event)
                if isinstance(event, Exited):
                    return

    def _send(self, request: Request) -> None:
        if not self._greeted:
            self._greet()
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
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                yield msgspec.json.decode(line, type=Event)
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                self.process.wait()
                return
            self._buffer += chunk
