"""What a process has started ends with it, wherever it went: also forks with a session of their own, also after `kill -9`.

A keeper stands between a process, the owner, and the command that it starts. Linux makes it the parent of every orphan
below it (PR_SET_CHILD_SUBREAPER), so all that was started can be found when the owner or the command has ended.
`start_kept` puts one around any command; a worker has one of its own.
"""

import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from flopwise.capped_log import CappedLog

GRACE_S = 5.0  # between asking a command to stop and ending it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE_S = 10.0  # a process that waits in the kernel for a device dies when that answers
_LOOK_S = 0.2  # where the system has no pidfd


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on this process is the parent of every orphan below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(started_by: int = 0) -> None:
    """When the parent is killed, so is this process (Linux; elsewhere it ends at its next event).

    `started_by`: who that is; it may have ended before this process came here.
    """
    parent = started_by or os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def descendants(pid: int) -> list[int]:
    """All processes below one, zombies included; none where the system has no /proc."""
    found = children = _children(pid)
    while children:
        children = [grandchild for child in children for grandchild in _children(child)]
        found = found + children
    return found


def _children(pid: int) -> list[int]:
    found = list[int]()
    with suppress(OSError):  # it has ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def end_descendants() -> bool:
    """Kill all that is below this process until nothing is; False: something does not end."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        found = descendants(os.getpid())
        if not found:
            return True
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)


class Keeper:
    """Waits for a child of this process and then ends all that is below it."""

    def __init__(self, child: int, owner: int, lifeline: int | None = None, log: CappedLog | None = None) -> None:
        """The owner is gone when its process is, or when nobody can write to the pipe `lifeline`."""
        self.child, self.owner, self.log = child, owner, log
        self._poller, self._on = select.poll(), dict[int, Callable[[], object]]()
        self._pidfds = [fd for pid in (child, owner) if (fd := _pidfd(pid)) is not None]
        for fd in self._pidfds:
            self._watch(fd, self._look_for_owner)
        if lifeline is not None:
            self._watch(lifeline, self._owner_gone, events=0)  # that it was closed is always told
        if log is not None:
            self._watch(log.printed, self._take_printed)
        self._deadline = math.inf
        self._look_for_owner()

    def _watch(self, fd: int, then: Callable[[], object], events: int = select.POLLIN) -> None:
        self._poller.register(fd, events)
        self._on[fd] = then

    def wait(self) -> int | None:
        """The child's wait status; None: its owner was gone first, or it did not end when asked to."""
        status = None
        while status is None and self.owner and time.monotonic() < self._deadline:
            for fd, _ in self._poller.poll(self._timeout_ms()):
                self._on[fd]()
            if len(self._pidfds) < 2:
                self._look_for_owner()
            ended, code = os.waitpid(self.child, os.WNOHANG)
            status = code if ended else None
        end_descendants()
        for fd in self._pidfds:
            os.close(fd)
        if self.log is not None:
            self.log.close()
        return status

    def ask_when(self, signals: int) -> None:
        """Ask the child to end as soon as there is something to read from this pipe."""

        def ask() -> None:
            os.read(signals, 1)
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
            with suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGTERM)

        self._watch(signals, ask)

    def _timeout_ms(self) -> float | None:
        seconds = min(self._deadline - time.monotonic(), _LOOK_S if len(self._pidfds) < 2 else math.inf)
        return None if seconds == math.inf else max(0.0, seconds * 1e3)

    def _owner_gone(self) -> None:
        self.owner = 0

    def _look_for_owner(self) -> None:
        self.owner = self.owner if process_runs(self.owner) else 0

    def _take_printed(self) -> None:
        assert self.log is not None
        if not self.log.take():
            self._poller.unregister(self.log.printed)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # it has ended; or the system has none
        return None


def process_runs(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        os.kill(pid, 0) if pid else None
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OSError:
        return pid != 0 and not Path("/proc/self").exists()
    return state not in (b"Z", b"X")


def keep(child: int, owner: int, lifeline: int, log: CappedLog | None = None) -> None:
    """Be the keeper of a child until it or its owner has ended; then end as the child has. Never returns.

    SIGTERM asks the child to end, and a little later ends it.
    """
    asked, ask = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(ask, b"."))
    for sign in (signal.SIGINT, signal.SIGHUP):  # the owner is asked, and asks in turn
        signal.signal(sign, signal.SIG_IGN)
    keeper = Keeper(child, owner, lifeline, log)
    keeper.ask_when(asked)
    status = keeper.wait()
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def start_kept(command: Sequence[str], log: Path, cwd: Path | None = None) -> "subprocess.Popen[bytes]":
    """Start a command under a keeper, in a session of its own; what it prints is appended to the log."""
    kept = [sys.executable, "-m", "flopwise.keeper", str(os.getpid()), str(log), str(cwd or "."), *command]
    nowhere = subprocess.DEVNULL
    pipe = subprocess.PIPE  # which tells the keeper when this process is gone
    return subprocess.Popen(kept, stdin=pipe, stdout=nowhere, stderr=nowhere, start_new_session=True)


def end_kept(process: "subprocess.Popen[bytes]") -> None:
    """End a keeper's command, unless it has ended, and all that it has started."""
    process.terminate()
    try:
        process.wait(GRACE_S + 2 * _PATIENCE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def main() -> None:
    """Run the command given, with nothing to read; see `start_kept`."""
    owner, log, folder, *command = sys.argv[1:]
    adopt_orphans()
    lifeline, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    printed, out = os.pipe()
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(keeper)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            os.chdir(folder)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
            os._exit(127)
    os.close(out)
    keep(child, int(owner), lifeline, CappedLog(printed, log))


if __name__ == "__main__":
    main()
