"""`python -m flopwise.worker.rank`, under torchrun: one rank of a trial. The first speaks for all; every one says if it fails."""

import os
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from flopwise.capture.build import resolve_device
from flopwise.capture.pipes import EventWriter, take_pipes
from flopwise.keeper import die_with_parent
from flopwise.lm.ranks import Ranks, joined, own_device, ranks_here
from flopwise.records.events import (
    Done,
    Event,
    MemoryMeasured,
    RanksMeasured,
    Request,
    Sampled,
    SnapshotWritten,
    Started,
    StepBuilt,
    TraceWritten,
)
from flopwise.records.run import INTERRUPTED, OK, STEP, RankRow
from flopwise.redact import redacted_lines
from flopwise.spec.workload import Trial
from flopwise.worker.jobs import run_trial_as_asked
from flopwise.worker.torchrun import PARENT, REQUEST


class _Row:
    """What this rank measured."""

    def __init__(self, rank: int, device: str) -> None:
        self.row, self.failed = RankRow(rank=rank, device=device), False

    def take(self, event: Event) -> None:
        replace = msgspec.structs.replace
        match event:
            case StepBuilt() if torch.cuda.is_initialized():
                self.row = replace(self.row, built_bytes=torch.cuda.memory_allocated())
            case Sampled():
                self.row = replace(self.row, wall_ns=(*self.row.wall_ns, event.phases[STEP].wall_ns))
            case MemoryMeasured():
                self.row = replace(self.row, memory=event.memory)
            case TraceWritten():
                self.row = replace(self.row, trace_file=Path(event.path).name)
            case SnapshotWritten():
                self.row = replace(self.row, memory_file=Path(event.path).name)
            case Done():
                self.failed = event.status not in (OK, INTERRUPTED)
                self.row = replace(self.row, peak_rss_bytes=event.peak_rss_bytes)
            case _:
                pass


def main() -> None:
    """Do this rank's part of the request."""
    die_with_parent(int(os.environ[PARENT]))
    commands, events = take_pipes()
    ranks = ranks_here()
    request = _of_this_rank(msgspec.json.decode(Path(os.environ[REQUEST]).read_bytes(), type=Request), ranks)
    emit = EventWriter(events, request.key, f"rank{ranks.rank}")
    emit.leave_in_forks()
    if ranks.first:
        emit(Started(pid=os.getpid()))
    trial = msgspec.json.decode(request.trial, type=Trial)
    device = own_device(ranks, resolve_device(trial.device))
    trial = msgspec.structs.replace(trial, device=str(device))
    mine = _Row(ranks.rank, str(device))

    def tell(event: Event) -> None:
        mine.take(event)
        if ranks.first or mine.failed:
            emit(event)

    code = 1
    try:
        with joined(ranks, device, alone=True, asked=trial.workload.backend):
            run_trial_as_asked(request, trial, tell, commands, ranks)
            if mine.failed:
                os._exit(1)  # the others cannot go on
            rows = ranks.gathered(mine.row)
            if ranks.first:
                emit(RanksMeasured(ranks=tuple(rows)))
        code = 0
    except BaseException:  # noqa: BLE001  the traceback belongs in the log
        sys.stderr.write(redacted_lines(traceback.format_exc()))
    finally:
        os._exit(code)


def _of_this_rank(request: Request, ranks: Ranks) -> Request:
    """The same, with files of its own."""
    if ranks.first:
        return request
    replace = msgspec.structs.replace
    trace, memory = request.trace, request.memory
    return replace(
        request,
        trace=trace and replace(trace, path=_own_file(trace.path, ranks.rank)),
        memory=memory and replace(memory, path=_own_file(memory.path, ranks.rank)),
    )


def _own_file(path: str, rank: int) -> str:
    """`x.json.gz` of rank 1: `x-rank1.json.gz`."""
    name, dot, suffix = Path(path).name.partition(".")
    return str(Path(path).with_name(f"{name}-rank{rank}{dot}{suffix}"))


if __name__ == "__main__":
    main()
