"""Several ranks for one trial. `python -m flopwise.worker.torchrun` is torchrun that ends with its parent."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import msgspec

from flopwise.capture.build import resolve_device
from flopwise.capture.pipes import GARBLED, GARBLED_HINT, Emit, EventReader, GarbledError
from flopwise.errors import Unsupported
from flopwise.keeper import die_with_parent
from flopwise.lm.ranks import check_backend
from flopwise.records.events import Done, Request, Started
from flopwise.records.run import CRASH, ERROR, INTERRUPTED, OK
from flopwise.scratch import scratch_folder
from flopwise.spec.workload import Trial

REQUEST = "FLOPWISE_RANK_REQUEST"  # the file with the request, in every rank
PARENT = "FLOPWISE_PARENT"  # the process that starts this one: torchrun for the ranks
_GRACE_S = 5.0
_GONE = re.compile(r"(?i)connection (?:reset|closed|refused)|broken pipe|remote process|peer")


def run_ranks(request: Request, trial: Trial, emit: Emit, commands: int) -> None:
    """Start the ranks, pass on what the first of them says, and end them all when one fails."""
    if request.agree is not None or request.compare is not None:
        raise Unsupported("losses of several ranks are not compared step by step", "use --parallel off", ("parallel",))
    check_backend(trial.workload.backend, trial.workload.recipe.ranks, resolve_device(trial.device))
    with scratch_folder() as folder:
        asked = folder / "request.json"
        asked.write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-m", "flopwise.worker.torchrun", "--standalone"]
        command += ["--nproc-per-node", str(trial.workload.recipe.ranks), "-m", "flopwise.worker.rank"]
        environment = os.environ | {
            REQUEST: str(asked),
            PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", _threads(trial)),
        }
        process = subprocess.Popen(command, stdin=commands, stdout=subprocess.PIPE, env=environment)
        try:
            _pass_on(process, EventReader(request.key), emit)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _threads(trial: Trial) -> str:
    """For each rank its share of the cores."""
    return str(max(1, len(os.sched_getaffinity(0)) // trial.workload.recipe.ranks))


def _pass_on(process: "subprocess.Popen[bytes]", reader: EventReader, emit: Emit) -> None:
    first = 0

    def stop(*_: object) -> None:
        if first:
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    assert process.stdout is not None
    for line in process.stdout:
        try:
            event = reader.event(line.removesuffix(b"\n"))
        except GarbledError:
            emit(Done(status=CRASH, reason=GARBLED, hint=GARBLED_HINT))
            return
        if isinstance(event, Started):
            first = event.pid
            continue
        if isinstance(event, Done) and event.status not in (OK, INTERRUPTED):
            emit(_left_alone(event))
            return  # the others may wait for one that is gone
        emit(event)


def _left_alone(failed: Done) -> Done:
    """Where a rank tells that its neighbour is gone, that one's end is the reason."""
    if failed.status != ERROR or not _GONE.search(failed.reason):
        return failed
    reason = f"a rank ended before the others, which then failed: {failed.reason}"
    return msgspec.structs.replace(
        failed, status=CRASH, reason=reason, hint="the run's logs/ folder has what each rank said"
    )


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.run import main

    main()
