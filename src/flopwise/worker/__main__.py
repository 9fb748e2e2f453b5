"""`python -m flopwise.worker --owner PID`: serves requests, each in a process of its own.

It imports torch once and forks for every request, so that each point has a process of its own (a crash or an OOM ends that
process alone) without paying for the import again. It touches no GPU before the fork. What a request's process has started
ends with it; the worker and all below it end with the owner, which a keeper sees to.
"""

import gc
import os
import select
import sys
import traceback
from collections.abc import Callable

import msgspec

from flopwise.capped_log import CappedLog
from flopwise.capture.pipes import Emit, EventWriter, forget, read_line, take_pipes
from flopwise.keeper import Keeper, adopt_orphans, die_with_parent, keep
from flopwise.records.events import Exited, Request, Started, WorkerReady
from flopwise.redact import redacted_lines

Serve = Callable[[Request, Emit, int], None]


def main() -> None:
    """Serve requests until the line ends."""
    owner = int(sys.argv[sys.argv.index("--owner") + 1]) if "--owner" in sys.argv else os.getppid()
    adopt_orphans()
    keeper, worker = os.getpid(), os.fork()
    if worker:
        lifeline = os.dup(0)
        forget(0)
        forget(1)
        keep(worker, owner, lifeline)
    adopt_orphans()  # of a step, when that has ended
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    commands, events = take_pipes()
    greet = EventWriter(events, "", "worker")
    try:
        from flopwise import torch_private

        with_compiler = "--compiler" in sys.argv
        if with_compiler:
            os.environ["TORCH_WARM_POOL"] = "0"  # no compile processes before the fork: they would be shared
        torch_private.load_compiler(backend=with_compiler)
        from flopwise.worker import jobs
    except ImportError as error:
        greet(WorkerReady(error=f"cannot import torch: {error}", hint="pip install 'flopwise[torch]'"))
        return
    gc.freeze()  # what is loaded stays: a collection in a fork would walk it all, and so copy its memory
    greet(WorkerReady())
    while line := _next(commands, keeper):
        request = msgspec.json.decode(line, type=Request)
        status = _run(request, commands, events, keeper, jobs.serve)
        if status is None:
            return  # the keeper is gone
        EventWriter(events, request.key, "worker")(Exited(code=os.waitstatus_to_exitcode(status)))


def _next(commands: int, keeper: int) -> bytes:
    """The next request; b'' when nobody is there to ask."""
    while os.getppid() == keeper:
        if select.select([commands], [], [], 1.0)[0]:
            line = read_line(commands)
            return line if os.getppid() == keeper else b""
    return b""


def _run(request: Request, commands: int, events: int, keeper: int, serve: Serve) -> int | None:
    printed, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(printed)
        _child(request, commands, events, out, serve)
    os.close(out)
    return Keeper(child, keeper, log=CappedLog(printed, request.log)).wait()


def _child(request: Request, commands: int, events: int, out: int, serve: Serve) -> None:
    """Never returns: whatever happens, this process ends here."""
    code = 1
    try:
        die_with_parent()
        for stream in (1, 2) if request.log else ():
            os.dup2(out, stream)
        os.close(out)
        if not request.turns:
            forget(commands)
        emit = EventWriter(events, request.key, "step")
        emit.leave_in_forks()
        emit(Started(pid=os.getpid()))
        serve(request, emit, commands)
        code = 0
    except BaseException:  # noqa: BLE001  the traceback belongs in the log
        sys.stderr.write(redacted_lines(traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
