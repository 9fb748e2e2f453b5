"""What a process prints, in a file that cannot fill the disk."""

import os
from contextlib import suppress

from flopwise.atomic import NO_FOLLOW, write_all

HEAD_BYTES, TAIL_BYTES = 4 << 20, 64 << 10  # the beginning and the end are kept
_CHUNK = 1 << 16


class CappedLog:
    """Takes what comes through a pipe. How much was left out between the beginning and the end is said in the file."""

    def __init__(self, printed: int, path: str) -> None:
        """`printed`: the pipe's end to read from, ours from now on. `path`: '' for nowhere."""
        self.printed = printed
        os.set_blocking(printed, False)
        self._fd: int | None = None
        self._tail, self._room, self._left_out = bytearray(), 0, 0
        with suppress(OSError):  # a full disk: the measurement goes on without a log
            if path:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_FOLLOW, 0o644)
                self._room = max(0, HEAD_BYTES - os.fstat(self._fd).st_size)

    def take(self) -> bool:
        """Take what was printed; False: nothing more can be."""
        try:
            text = os.read(self.printed, _CHUNK)
        except BlockingIOError:
            return True
        self._keep(text)
        return bool(text)

    def _keep(self, text: bytes) -> None:
        self._write(text[: self._room])
        rest = text[self._room :]
        self._room -= len(text) - len(rest)
        self._tail += rest
        if (more := len(self._tail) - TAIL_BYTES) > 0:
            del self._tail[:more]
            self._left_out += more

    def close(self) -> None:
        """Take what is still in the pipe, which its writers have left, and end the file."""
        for _ in range((1 << 20) // _CHUNK):  # the largest pipe that needs no privilege
            self.take()
        os.close(self.printed)
        if self._left_out:
            self._write(b"\n[flopwise: %d bytes of output left out here]\n" % self._left_out)
        self._write(bytes(self._tail))
        if self._fd is not None:
            os.close(self._fd)

    def _write(self, text: bytes) -> None:
        if self._fd is None or not text:
            return
        try:
            write_all(self._fd, text)
        except OSError:
            os.close(self._fd)
            self._fd = None
