"""The program that nsys runs: `python -m flopwise.capture.nsys_target JOB.json`. It reports itself before importing torch."""

import faulthandler
import os
import sys
from pathlib import Path

import msgspec

from flopwise.capture.pipes import EventWriter
from flopwise.records.events import Done, NsysJob, Started
from flopwise.records.run import ERROR


def main() -> None:
    """Do the job that the file describes; its events go to the job's file of events."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=NsysJob)
    faulthandler.dump_traceback_later(job.timeout_s, exit=True)  # the process that would end this one may be gone
    events = os.open(job.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    emit = EventWriter(events, job.key, "step")
    emit.leave_in_forks()
    emit(Started(pid=os.getpid()))
    try:
        from flopwise.capture.nsys_steps import run_job
    except ImportError as error:
        emit(Done(status=ERROR, reason=f"cannot import torch under nsys: {error}"))
        raise
    run_job(job, emit)


if __name__ == "__main__":
    main()
