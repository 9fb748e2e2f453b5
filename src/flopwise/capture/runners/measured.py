"""One trial on the machine that this process runs on: timed, and traced where it asks for that."""

from pathlib import Path
from typing import Protocol

from flopwise.capture.isolate import Worker
from flopwise.capture.processes import run_processes
from flopwise.capture.progress import Progress
from flopwise.capture.traced_trial import SUFFIXES, run_traced
from flopwise.records.events import TraceRequest
from flopwise.records.run import Point
from flopwise.spec.workload import Trial


class RunFolder(Protocol):
    """Where the files of a run belong; `store.Run` is one."""

    def log_path(self, key: str) -> Path: ...

    def trace_path(self, name: str) -> Path: ...


def measured(worker: Worker, trial: Trial, folder: RunFolder, progress: Progress) -> Point:
    """The trial's row; its log and its trace are in the folder."""
    if not trial.trace:
        return run_processes(worker, trial, folder.log_path(trial.key()), progress.event)
    path = folder.trace_path(f"{trial.key()}{SUFFIXES[trial.trace]}").resolve()
    return run_traced(worker, trial, trial.trace, TraceRequest(path=str(path)), folder.log_path, progress)
