"""Trials on a cluster: each is a job there, its row comes back here. What is lost is sent again, a few times.

The cluster's own software queues and places the jobs; this only hands them over, waits, and writes what comes back.
"""

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from flopwise.capture.point_builder import PointBuilder
from flopwise.capture.progress import Progress
from flopwise.capture.runners.measured import RunFolder
from flopwise.capture.runners.node_side import measure_here
from flopwise.capture.runners.nodes import Needs, Node, Share, share, trial_needs
from flopwise.capture.runners.runner import Runner
from flopwise.capture.traced_trial import check_device
from flopwise.errors import FlopwiseError
from flopwise.records.cluster import Returned, TrialRequest
from flopwise.records.events import DeviceInfo, Done
from flopwise.records.run import LOST, OOM, TIMEOUT, Point
from flopwise.spec.workload import NSYS, Trial, UserStep, Workload
from flopwise.version import __version__

ATTEMPTS = 3  # of a job whose worker or node is lost
POLL_S = 1.0
LOOK_S = 20.0  # between two looks at which nodes are left
PATIENCE_S = 60.0  # that a job may wait while no node could run it: a cluster replaces nodes
CANCEL_S = 10.0  # for what was running to send back what it had measured


@dataclass(frozen=True)
class Job:
    """A function of flopwise, to be called on a node with the driver's version and a request."""

    name: str
    label: str
    function: Callable[[str, bytes], bytes]
    request: bytes
    needs: Needs


@dataclass(frozen=True)
class Ended:
    """How a job ended: what it returned, or why it returned nothing."""

    returned: Returned | None = None
    status: str = ""  # without a result: LOST, OOM, TIMEOUT or INTERRUPTED
    reason: str = ""


class Cluster(ABC):
    """The software that runs jobs on nodes. A handle is what it knows a job by."""

    name: str
    at_once: int  # jobs handed over, running and waiting together

    @abstractmethod
    def nodes(self) -> list[Node]:
        """Every node that is up, whatever runs there now."""

    @abstractmethod
    def submit(self, job: Job, given: Share) -> Hashable: ...

    @abstractmethod
    def wait(self, handles: Sequence[Hashable], seconds: float) -> list[Hashable]:
        """Those that have ended; returns early when there is one."""

    @abstractmethod
    def ended(self, handle: Hashable) -> Ended: ...

    @abstractmethod
    def cancel(self, handles: Sequence[Hashable], force: bool) -> None:
        """Take jobs back. Not `force`: what is running is asked to stop, and may still return."""

    @abstractmethod
    def close(self) -> None: ...


class ClusterRunner(Runner):
    """Hands jobs to a cluster; only this process writes the run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pending: dict[Hashable, tuple[Job, Share]] = {}
        self._succeeded = False

    def check(self, trials: Sequence[Trial]) -> Mapping[str, DeviceInfo]:
        nodes = self.cluster.nodes()
        for trial in trials:
            check_portable(trial.workload)
            if trial.trace == NSYS and trial.device != "auto":
                check_device(trial.device)
            share(trial_needs(trial), nodes)
        return {}

    def measure(
        self, trials: Sequence[Trial], folder: RunFolder, progress: Progress, begin: Callable[[Trial], None]
    ) -> Iterator[Point]:
        by_name = {trial.key(): trial for trial in trials}
        for name, ended in self.collect([trial_job(trial) for trial in by_name.values()], progress):
            returned = ended.returned
            if returned is None:
                done = Done(status=ended.status, reason=ended.reason, hint=_HINTS.get(ended.status, ""))
                yield PointBuilder(by_name[name]).point(done)
            elif returned.point is not None:
                _keep_files(returned.files, folder)
                yield returned.point

    def collect(self, jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[str, Ended]]:
        """Every job with how it ended, as they end. After Ctrl-C: what was running and sent something, then KeyboardInterrupt."""
        try:
            yield from self._all(jobs, progress)
        except KeyboardInterrupt:
            yield from self._cut_short()
            raise
        finally:
            self._cancel_pending()

    def close(self) -> None:
        self._cancel_pending()
        self.cluster.close()

    def _all(self, jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[str, Ended]]:
        backlog, attempts = deque(jobs), Counter[str]()
        nodes, looked = self.cluster.nodes(), time.monotonic()
        stranded_since: dict[Hashable, float] = {}
        while backlog or self.pending:
            while backlog and len(self.pending) < self.cluster.at_once:
                job = backlog.popleft()
                attempts[job.name] += 1
                try:
                    given = share(job.needs, nodes)
                except FlopwiseError as error:  # it could when it was checked: nodes went away
                    yield job.name, Ended(status=LOST, reason=error.message)
                    continue
                if not self._submit(job, given):
                    attempts[job.name] -= 1
                    backlog.appendleft(job)
            progress.waiting(len(self.pending), len(backlog), self.cluster.name)
            for handle in self.cluster.wait(list(self.pending), POLL_S):
                job, _ = self.pending.pop(handle)
                ended = self._judge(self.cluster.ended(handle))
                if ended.status == LOST and attempts[job.name] < ATTEMPTS:
                    progress.note(f"{job.label}: {ended.reason}; sent again")
                    backlog.append(job)
                    nodes = self.cluster.nodes()
                    continue
                if ended.status == LOST:
                    ended = Ended(status=LOST, reason=f"{ended.reason}, {attempts[job.name]} times")
                self._succeeded = True
                yield job.name, ended
            if time.monotonic() - looked > LOOK_S:
                nodes, looked = self.cluster.nodes(), time.monotonic()
                backlog.extend(self._stranded(nodes, stranded_since))

    def _submit(self, job: Job, given: Share) -> bool:
        """False: the cluster takes no more of them at a time than it has now."""
        try:
            with _ctrl_c_waits():
                self.pending[self.cluster.submit(job, given)] = job, given
        except FlopwiseError:
            if not self.pending:
                raise
            self.cluster.at_once = len(self.pending)
            return False
        return True

    def _judge(self, ended: Ended) -> Ended:
        """A node on which flopwise cannot work counts as lost; if it is the first that answers, it ends all."""
        if ended.returned is None or not ended.returned.problem:
            return ended
        if not self._succeeded:
            raise FlopwiseError(ended.returned.problem, ended.returned.hint)
        return Ended(status=LOST, reason=ended.returned.problem)

    def _stranded(self, nodes: Sequence[Node], since: dict[Hashable, float]) -> list[Job]:
        """Take back the jobs that no node which is left could run: they would wait for ever."""
        waiting = {h for h, (_, given) in self.pending.items() if not any(given.fits(node) for node in nodes)}
        for handle in [h for h in since if h not in waiting]:
            del since[handle]
        now = time.monotonic()
        late = [handle for handle in waiting if now - since.setdefault(handle, now) > PATIENCE_S]
        self.cluster.cancel(late, force=True)
        return [self.pending.pop(handle)[0] for handle in late]

    def _cut_short(self) -> Iterator[tuple[str, Ended]]:
        """Ask what is running to stop; whatever it had measured is kept."""
        self.cluster.cancel(list(self.pending), force=False)
        deadline = time.monotonic() + CANCEL_S
        while self.pending and time.monotonic() < deadline:
            for handle in self.cluster.wait(list(self.pending), POLL_S):
                job, _ = self.pending.pop(handle)
                ended = self.cluster.ended(handle)
                if ended.returned is not None and not ended.returned.problem:
                    yield job.name, ended

    def _cancel_pending(self) -> None:
        left = list(self.pending)
        self.pending.clear()
        if left:
            self.cluster.cancel(left, force=True)


_HINTS = {
    LOST: "the same command measures it again",
    OOM: "a smaller batch or context, checkpointing, bf16, fused attention or chunked loss needs less",
    TIMEOUT: "raise timeout_s in the sweep's file, or make the workload smaller",
}


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Until the cluster has the job and we know its handle: else nobody could take it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


def check_portable(workload: Workload) -> None:
    """Refuse a step that exists in this process alone."""
    if isinstance(workload.subject, UserStep) and workload.subject.pickled:
        raise FlopwiseError(
            f"{workload.target} is a function of this process, which a cluster's node cannot import",
            "save it to a file that every node has (file.py:factory)",
        )


def trial_job(trial: Trial) -> Job:
    request = msgspec.msgpack.encode(TrialRequest(trial=trial, folder=str(Path.cwd())))
    return Job(trial.key(), trial.workload.label(), measure_here, request, trial_needs(trial))


def _keep_files(files: Mapping[str, bytes], folder: RunFolder) -> None:
    """Write what a node sent to where it belongs; logs of several attempts follow each other."""
    for name, content in files.items():
        parts = PurePosixPath(name).parts
        if len(parts) != 2 or parts[0] not in ("logs", "traces"):
            raise FlopwiseError(f"a node sent the file '{name}', which belongs nowhere", "is it the same flopwise?")
        if parts[0] == "logs":
            with folder.log_path(parts[1].removesuffix(".log")).open("ab") as log:
                log.write(content)
        else:
            folder.trace_path(parts[1]).write_bytes(content)


def call_there(job: Job) -> tuple[Callable[[str, bytes], bytes], str, bytes]:
    """What a cluster calls, and with what."""
    return job.function, __version__, job.request
