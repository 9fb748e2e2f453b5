"""`python -m flopwise.worker`: serves requests, each in a process of its own.

It imports torch once and forks for every request, so that each point has a process of its own (a crash or an OOM ends that
process alone) without paying for the import again. It touches no GPU before the fork.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable

import msgspec

from flopwise.atomic import NO_FOLLOW
from flopwise.capture.pipes import Emit, die_with_parent, emit, read_line, take_pipes
from flopwise.records.events import Exited, Request, Started, WorkerReady


def main() -> None:
    """Serve requests until the line ends."""
    die_with_parent()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    commands, events = take_pipes()
    try:
        from flopwise import torch_private

        with_compiler = "--compiler" in sys.argv
        if with_compiler:
            os.environ["TORCH_WARM_POOL"] = "0"  # no compile processes before the fork: they would be shared
        torch_private.load_compiler(backend=with_compiler)
        from flopwise.worker import jobs
    except ImportError as error:
        emit(events, WorkerReady(error=f"cannot import torch: {error}", hint="pip install 'flopwise[torch]'"))
        return
    gc.freeze()  # what is loaded stays: a collection in a fork would walk it all, and so copy its memory
    emit(events, WorkerReady())
    while line := read_line(commands):
        request = msgspec.json.decode(line, type=Request)
        pid = os.fork()
        if pid == 0:
            _child(request, commands, events, jobs.serve)
        _, status = os.waitpid(pid, 0)
        emit(events, Exited(code=os.waitstatus_to_exitcode(status)))


def _child(request: Request, commands: int, events: int, serve: Callable[[Request, Emit, int], None]) -> None:
    """Never returns: whatever happens, this process ends here."""
    code = 1
    try:
        die_with_parent()
        if request.log:
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_FOLLOW, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        emit(events, Started(pid=os.getpid()))
        serve(request, lambda event: emit(events, event), commands)
        code = 0
    except BaseException:  # noqa: BLE001  the traceback belongs in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
