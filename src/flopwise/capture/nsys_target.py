"""What nsys runs: `python -m flopwise.capture.nsys_target JOB.json`. It says that it is there before it imports torch."""

import faulthandler
import os
import sys
from pathlib import Path

import msgspec

from flopwise.records.events import Done, Event, NsysJob, Started
from flopwise.records.run import ERROR


def main() -> None:
    """Do the job that the file describes; what happens is written to the job's file of events."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=NsysJob)
    faulthandler.dump_traceback_later(job.timeout_s, exit=True)  # who would end this process may be gone
    events = os.open(job.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def emit(event: Event) -> None:
        line = msgspec.json.encode(event) + b"\n"
        while line:
            line = line[os.write(events, line) :]

    emit(Started(pid=os.getpid()))
    try:
        from flopwise.capture.nsys_steps import run_job
    except ImportError as error:
        emit(Done(status=ERROR, reason=f"cannot import torch under nsys: {error}"))
        raise
    run_job(job, emit)


if __name__ == "__main__":
    main()
