"""Slurm, by way of submitit: one batch job for every trial. Its files lie where the nodes see them, among the runs."""

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from flopwise.capture.runners.cluster import Cluster, Ended, Job, call_there
from flopwise.capture.runners.nodes import Node, Share
from flopwise.errors import FlopwiseError, one_line
from flopwise.records.cluster import Returned
from flopwise.records.run import INTERRUPTED, LOST, OOM, TIMEOUT
from flopwise.scratch import Scratch

ASK_S = 30.0  # between two questions to Slurm; a result is seen in the file system before
_NOT_UP = ("down", "drain", "fail", "error", "unknown", "inval", "maint")  # how the states of nodes begin
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")
_SITE = "partition, account and the like: sbatch reads SBATCH_PARTITION, SBATCH_ACCOUNT, …"


class SlurmCluster(Cluster):
    """`folder`: on a file system that all nodes share. `executor`: of submitit; any but 'slurm' is for tests, on this machine."""

    name = "slurm"

    def __init__(self, folder: Path, executor: str = "slurm") -> None:
        self.submitit = _import_submitit()
        if executor == "slurm" and not shutil.which("sbatch"):
            raise FlopwiseError(
                "there is no sbatch here: this is no machine of a Slurm cluster", "run it on a login node"
            )
        self.executor, self.at_once = executor, 100
        self.parent, self.folder = folder, Path()
        self._asked, self._taken_back = time.monotonic(), set[Hashable]()

    def nodes(self) -> list[Node]:
        if self.executor != "slurm":
            return [Node(os.cpu_count() or 1)]
        partition = os.environ.get("SBATCH_PARTITION", "")
        command = ["sinfo", "-h", "-N", "-o", "%c|%G|%T", *(["-p", partition] if partition else [])]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            said = one_line(getattr(error, "stderr", "") or str(error))
            raise FlopwiseError(
                f"sinfo does not say what the cluster has: {said}", "does Slurm answer? try: sinfo"
            ) from None
        return parse_nodes(listed)

    def submit(self, job: Job, given: Share) -> Hashable:
        if not self.folder.name:
            self.parent.mkdir(parents=True, exist_ok=True)
            self.scratch = Scratch(self.parent, ".slurm-")
            self.folder = self.scratch.path
        executor = self.submitit.AutoExecutor(folder=self.folder, cluster=self.executor)
        executor.update_parameters(**parameters(given))
        try:
            handle: Hashable = executor.submit(*call_there(job))
        except (self.submitit.core.utils.FailedJobError, self.submitit.core.utils.FailedSubmissionError) as error:
            raise FlopwiseError(f"sbatch refuses the job: {_last_line(str(error))}", _SITE) from None
        return handle

    def wait(self, handles: Sequence[Hashable], seconds: float) -> list[Hashable]:
        deadline = time.monotonic() + seconds
        while True:
            if handles and time.monotonic() - self._asked > ASK_S:
                self._asked = time.monotonic()
                handles[0].done(force_check=True)  # type: ignore[attr-defined]  # which asks for all
            ended = [one for one in handles if one in self._taken_back or self._is_done(one)]
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return ended
            time.sleep(min(left, 0.2))

    def _is_done(self, job: Any) -> bool:
        """A preempted job may be queued again, or not: submitit takes it for running."""
        return bool(job.done()) or (job.state.startswith("PREEMPTED") and not _is_queued(job.job_id))

    def ended(self, handle: Hashable) -> Ended:
        if handle in self._taken_back:
            return Ended(status=INTERRUPTED, reason="taken back")
        job: Any = handle
        errors = self.submitit.core.utils
        if not job.paths.result_pickle.exists():
            state = job.get_info(mode="force").get("State", job.state)
            if not state.startswith("COMPLETED"):  # else its result is on its way through the file system
                return _without_result(state, job)
        try:
            return Ended(msgspec.msgpack.decode(job.result(), type=Returned))
        except errors.UncompletedJobError:
            return _without_result("COMPLETED", job)
        except errors.FailedJobError as error:
            return Ended(Returned(problem=f"a job failed: {_last_line(str(error).partition('-----')[2])}"))

    def cancel(self, handles: Sequence[Hashable], force: bool) -> None:
        for handle in handles:
            handle.cancel(check=False)  # type: ignore[attr-defined]
        self._taken_back |= set(handles)

    def close(self) -> None:
        if self.folder.name:
            self.scratch.close()


def parameters(given: Share) -> dict[str, Any]:
    """A job's share as submitit names it; a whole node has all of its memory, too."""
    asked: dict[str, Any] = {
        "name": "flopwise",  # scancel --name flopwise
        "nodes": 1,
        "tasks_per_node": 1,
        "cpus_per_task": max(1, given.cpus),
        "timeout_min": given.minutes,
    }
    if given.gpus:
        asked["gpus_per_node"] = given.gpus
    if given.whole:
        asked |= {"slurm_exclusive": True, "slurm_additional_parameters": {"mem": "0"}}
    return asked


def parse_nodes(listed: str) -> list[Node]:
    """The nodes that are up, from lines of `CPUs|generic resources|state`.

    >>> parse_nodes("96|gpu:h100:8(S:0-1)|mixed\\n64|(null)|idle\\n64|gpu:4|drained*\\n")
    [Node(cpus=96, gpus=8), Node(cpus=64, gpus=0)]
    """
    rows = [line.split("|") for line in listed.splitlines() if line.count("|") == 2]
    up = [row for row in rows if row[0].strip().isdigit() and not row[2].strip().startswith(_NOT_UP)]
    return [Node(int(row[0]), sum(map(int, _GPUS.findall(row[1])))) for row in up]


def _without_result(state: str, job: Any) -> Ended:
    """By what Slurm says of a job that left no result."""
    if state.startswith("OUT_OF_ME"):
        return Ended(status=OOM, reason="Slurm ended it: it took more memory than its job may")
    if state.startswith(("TIMEOUT", "DEADLINE")):
        return Ended(status=TIMEOUT, reason="Slurm ended it: its job took too long")
    said = _last_line(job.stderr() or "")
    return Ended(status=LOST, reason=f"its job left no result ({state.lower()}{f': {said}' if said else ''})")


def _is_queued(job_id: str) -> bool:
    try:
        asked = ("squeue", "-h", "-j", job_id)
        return bool(subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return True


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip(" -")]
    return one_line(lines[-1], 200) if lines else ""


def _import_submitit() -> ModuleType:
    try:
        import submitit
        import submitit.core.utils
    except ImportError:
        raise FlopwiseError(
            "--on slurm needs submitit, which is not installed", "pip install 'flopwise[slurm]'"
        ) from None
    logging.getLogger("submitit").setLevel(logging.CRITICAL)  # a failed job is a row
    found: ModuleType = submitit
    return found
