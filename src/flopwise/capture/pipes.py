"""A worker's side of its pipes: JSON lines in and out; and how it ends with the process that started it."""

import bdb
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from flopwise.records.events import Event

Emit = Callable[[Event], None]
_PR_SET_PDEATHSIG = 1


def emit(fd: int, event: Event) -> None:
    """Write one event as a line, whole."""
    line = msgspec.json.encode(event) + b"\n"
    while line:
        line = line[os.write(fd, line) :]


def take_pipes() -> tuple[int, int]:
    """Where commands come from and events go to. What a workload prints is then no event, and what it reads is nothing.

    `breakpoint()` in a step would else wait for ever, or read the commands.
    """
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if os.environ.get("PYTHONBREAKPOINT") != "0":  # who sets it so wants none
        sys.breakpointhook = _no_terminal
    return commands, events


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


def die_with_parent(started_by: int = 0) -> None:
    """When the parent is killed, so is this process (Linux; elsewhere it ends at its next event).

    `started_by`: who that is; it may have ended before this process came here.
    """
    parent = started_by or os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
