"""The process that measures: `python -m flopwise.capture.worker`, spoken to in JSON lines.

It imports torch once and forks for every trial, so that each point has a process of its own (a crash or an OOM ends that
process alone) without paying for the import again. It touches no GPU before the fork.
"""

import ctypes
import importlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

import msgspec

from flopwise.capture.events import (
    Agreed,
    AgreeRequest,
    Done,
    Dried,
    Event,
    Exited,
    Hello,
    Probed,
    Request,
    Started,
    Surroundings,
    Told,
)
from flopwise.errors import FlopwiseError
from flopwise.spec.workload import Trial, Workload

if TYPE_CHECKING:
    import torch

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until the line ends."""
    die_with_parent()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    events = os.dup(1)
    os.dup2(2, 1)  # what a workload prints is not an event
    try:
        import torch
        import torch._dynamo

        if "--compiler" in sys.argv:
            os.environ["TORCH_WARM_POOL"] = "0"  # no compile processes before the fork: they would be shared
            import torch._inductor.compile_fx  # noqa: F401

        import flopwise.capture.trials  # noqa: F401
    except ImportError as error:
        _emit(
            events,
            Hello(error=f"cannot import torch: {error}", hint="pip install 'flopwise[torch]' -c constraints.txt"),
        )
        return
    _emit(events, Hello())
    while line := _read_line():
        request = msgspec.json.decode(line, type=Request)
        pid = os.fork()
        if pid == 0:
            _child(request, events)
        _, status = os.waitpid(pid, 0)
        _emit(events, Exited(code=os.waitstatus_to_exitcode(status)))


def _child(request: Request, events: int) -> None:
    """Never returns: whatever happens, this process ends here."""
    code = 1
    try:
        die_with_parent()
        if request.log:
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        _emit(events, Started(pid=os.getpid()))
        _serve(request, events)
        code = 0
    except BaseException:  # noqa: BLE001  the traceback belongs in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(request: Request, events: int) -> None:
    import torch

    from flopwise.capture.build import resolve_device
    from flopwise.capture.environment import environment
    from flopwise.capture.memory_limit import free_bytes, limit_memory
    from flopwise.capture.memory_trial import record_trial
    from flopwise.capture.trials import run_trial, why

    if request.dry:
        _dry_run(request, events)
        return
    if request.call:
        _call(request, events)
        return
    if not request.trial:
        try:
            device = resolve_device(request.device)
        except FlopwiseError as error:
            _emit(events, why(error))
            return
        _emit(
            events,
            Surroundings(environment=environment(device), device=str(device), free_bytes=free_bytes(device)),
        )
        if request.calibrate:
            _calibrate(device, events)
        return
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGTERM, interrupt)
    trial = msgspec.json.decode(request.trial, type=Trial)
    if trial.device == "cpu" or not torch.cuda.is_available():
        limit_memory()

    def may_go_on() -> bool:
        return not interrupted and (not request.turns or _read_line() == b"go\n")

    if request.agree is not None:
        _agree(trial, request.agree, events)
        return
    if request.memory is not None:
        record_trial(trial, lambda event: _emit(events, event), may_go_on, request.memory)
        return
    run_trial(
        trial, lambda event: _emit(events, event), may_go_on, request.turns, request.trace, request.compare,
        request.fewest, request.details,
    )  # fmt: skip


def _calibrate(device: "torch.device", events: int) -> None:
    from flopwise.capture.calibrate import how_many, probes
    from flopwise.capture.trials import why

    try:
        of = how_many(device)
        for n, probe in enumerate(probes(device), 1):
            _emit(events, Probed(probe=probe, n=n, of=of))
    except Exception as error:  # out of memory, above all: other processes use the GPU, too
        _emit(events, why(error))
        raise


def _agree(trial: Trial, request: AgreeRequest, events: int) -> None:
    from flopwise.capture.agreement import agree
    from flopwise.capture.trials import why

    try:
        _emit(events, Agreed(agreement=agree(trial, request)))
    except Exception as error:
        _emit(events, why(error))
        if not isinstance(error, FlopwiseError):
            raise  # the log keeps the traceback


def _dry_run(request: Request, events: int) -> None:
    from flopwise.capture.dry_run import dry_run
    from flopwise.capture.trials import why

    try:
        run = dry_run(msgspec.json.decode(request.dry, type=Workload), request.architecture)
    except Exception as error:
        _emit(events, why(error))
        if not isinstance(error, FlopwiseError):
            raise  # the log keeps the traceback
        return
    _emit(events, Dried(run=run))


def _call(request: Request, events: int) -> None:
    """The function lies to the right of this room, so it is found by its name."""
    from flopwise.capture.trials import why
    from flopwise.records import OK

    module, _, name = request.call.partition(":")
    try:
        getattr(importlib.import_module(module), name)(request.argument, lambda text: _emit(events, Told(text=text)))
        _emit(events, Done(status=OK))
    except Exception as error:
        _emit(events, why(error))
        if not isinstance(error, FlopwiseError):
            raise  # the log keeps the traceback


def _emit(fd: int, event: Event) -> None:
    line = msgspec.json.encode(event) + b"\n"
    while line:
        line = line[os.write(fd, line) :]


def _read_line() -> bytes:
    """One line from standard input, unbuffered: the child that is forked next must find the rest of it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)


def die_with_parent() -> None:
    """When the parent is killed, so is this process (Linux; elsewhere it ends at its next event)."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
