"""A worker's side of its pipes, and the lines that go through them: events one way, requests the other.

An event's line is `NAME COUNT DIGEST JSON`. Who writes it, the how manieth of theirs it is and the digest, whose key only
the writer and the reader are told, show what a step has written there, taken away or changed by accident.
"""

import bdb
import errno
import hashlib
import os
import sys
from collections.abc import Callable

import msgspec

from flopwise.records.events import Event

Emit = Callable[[Event], None]
PIPE_LOST = 86  # the exit code of a process whose step has closed its pipe
GARBLED, GARBLED_HINT = (
    "the step wrote into flopwise's own pipe",
    "does it write to file descriptors that it has not opened?",
)
CLOSED, CLOSED_HINT = "the step closed flopwise's own pipe", "does it close file descriptors that it has not opened?"
MOST_LINE_BYTES = 256 << 20
_HIGH = 700  # a descriptor that nobody meets by counting up from 3


class GarbledError(Exception):
    """A line that is not what its writer wrote, or not the next of its lines."""


def _digest(key: str, head: str, body: bytes) -> str:
    return hashlib.blake2b(head.encode() + body, key=key.encode(), digest_size=8).hexdigest()


class EventWriter:
    """Writes this process's events. `name`: of the process, among those that write to the same pipe."""

    def __init__(self, fd: int, key: str, name: str) -> None:
        self.fd, self._key, self._name, self._count = fd, key, name, 0
        self._pid, self._file = os.getpid(), _identity(fd)

    def __call__(self, event: Event) -> None:
        """Write one event as a line, whole. A fork that has come back from the step has nothing to say, and ends."""
        if os.getpid() != self._pid:
            os._exit(0)
        body = msgspec.json.encode(event)
        head = f"{self._name} {self._count}"
        line = f"{head} {_digest(self._key, head, body)} ".encode() + body + b"\n"
        self._count += 1
        if _identity(self.fd) != self._file:  # it may be a file of the step's own by now
            os._exit(PIPE_LOST)
        while line:
            line = line[os.write(self.fd, line) :]

    def leave_in_forks(self) -> None:
        """Forks of the step do not inherit the pipe."""
        os.register_at_fork(after_in_child=lambda: forget(self.fd) if _identity(self.fd) == self._file else None)


def _identity(fd: int) -> tuple[int, int]:
    try:
        found = os.fstat(fd)
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


class EventReader:
    """Reads what writers with this key wrote."""

    def __init__(self, key: str) -> None:
        self._key, self._counts = key, dict[str, int]()

    def event(self, line: bytes) -> Event:
        """The event of one line, without its end; raises GarbledError."""
        try:
            name, count, digest, body = line.split(b" ", 3)
            head = f"{name.decode()} {self._counts.get(name.decode(), 0)}"
            if head != f"{name.decode()} {int(count)}" or digest.decode() != _digest(self._key, head, body):
                raise GarbledError
            self._counts[name.decode()] = int(count) + 1
            event: Event = msgspec.json.decode(body, type=Event)
            return event
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise GarbledError from None


def take_pipes() -> tuple[int, int]:
    """Where commands come from and events go to. What a workload prints is then no event, and what it reads is nothing.

    `breakpoint()` in a step would else wait for ever, or read the commands.
    """
    commands, events = _high(0), _high(1)
    forget(0)
    os.dup2(2, 1)
    if os.environ.get("PYTHONBREAKPOINT") != "0":  # who sets it so wants none
        sys.breakpointhook = _no_terminal
    return commands, events


def _high(fd: int) -> int:
    import fcntl  # not on Windows, where the other half of this file is read

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EMFILE):  # fewer descriptors are allowed
            raise
        return os.dup(fd)


def forget(fd: int) -> None:
    """The descriptor stays taken, but leads nowhere."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, fd, inheritable=fd < 3)
    os.close(nothing)


def _no_terminal(*_args: object, **_more: object) -> None:
    raise bdb.BdbQuit


def read_line(commands: int) -> bytes:
    """One command, unbuffered: a child that is forked next must find the rest of the input."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(commands, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)
