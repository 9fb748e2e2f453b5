"""A program that runs a user's script in its own process, and takes all that the script started with it when it is killed.

Nobody stands above it, as a keeper does above a worker. So it begins again with a mark in its environment, which forks and
commands inherit, and a watcher in the background, which ends what carries the mark once the program is gone without a word.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flopwise.keeper import die_with_parent, process_runs

MARK = "FLOPWISE_MARK"
_INTERRUPTED = (129, 130, 143)  # the exit codes after HUP, INT and TERM
_ROUNDS = 500  # of looking for what is still there


@contextmanager
def all_with_the_program(words: Sequence[str]) -> Iterator[None]:
    """Under torchrun a program ends with it; what a script that is run in this process started ends if that is killed.

    So it does if it was interrupted. What it left running on purpose stays when it ends by itself.
    """
    stopped, process, watcher = False, os.getpid(), _take_along() if "run" in words[1:3] else 0
    if "TORCHELASTIC_RUN_ID" in os.environ and {"run", "train"} & set(words[1:3]):
        die_with_parent()
    try:
        yield
    except SystemExit as ended:
        stopped = ended.code in _INTERRUPTED
        raise
    finally:
        if watcher and not stopped and os.getpid() == process:  # not in a fork of the script's
            with suppress(ProcessLookupError, PermissionError):
                os.kill(watcher, signal.SIGTERM)


def _take_along() -> int:
    """From now on all that this program starts is killed if it is; the watcher's process id, or 0: there is none here."""
    if not hasattr(os, "pidfd_open") or not Path("/proc/self/environ").exists():
        return 0
    mark = os.environ.get(MARK, "")
    if mark.partition("-")[0] != str(os.getpid()):
        os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, os.environ)
    try:
        return _watcher(mark)
    except OSError:
        return 0


def _watcher(mark: str) -> int:
    """Not a child: a script may wait for all of its own."""
    program, (tell, told) = os.pidfd_open(os.getpid()), reversed(os.pipe())
    between = os.fork()
    if between == 0:
        os.setsid()
        watcher = os.fork()
        if watcher:
            os.write(tell, b"%d" % watcher)
            os._exit(0)
        _watch(program, mark)
    os.waitpid(between, 0)
    try:
        return int(os.read(told, 20) or 0)
    finally:
        for fd in (program, tell, told):
            os.close(fd)


def _watch(program: int, mark: str) -> None:
    """Never returns."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for fd in [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]:
        if fd != program:
            with suppress(OSError):
                os.close(fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    select.select([program], [], [])
    for _ in range(_ROUNDS):
        left = marked(mark)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.01)
    os._exit(0)


def marked(mark: str) -> list[int]:
    """The processes that carry a mark, this one left out."""
    wanted, found = f"{MARK}={mark}".encode(), list[int]()
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and process_runs(int(name)):
                found += [int(name)] if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") else []
    return found
