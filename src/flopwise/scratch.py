"""Folders for scratch files. They are removed in the end; those of a process that was killed, by the next one."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flopwise.atomic import NO_FOLLOW

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows: nothing is swept
    HAS_LOCKS = False

PREFIX = "flopwise-"
_OWNER = ".owner"  # locked for as long as its process lives, however that ends


class Scratch:
    """A folder of this process; on this machine's disk for such, or in `where`."""

    def __init__(self, where: Path | None = None, prefix: str = PREFIX) -> None:
        sweep(where, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where)).resolve()
        self._lock: int | None = None
        with suppress(OSError):
            self._lock = _owned(self.path)

    def close(self) -> None:
        """Remove the folder and all in it. Closing twice does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder that is removed afterwards."""
    scratch, empty = Scratch(), "files"
    try:
        (scratch.path / empty).mkdir()
        yield scratch.path / empty
    finally:
        scratch.close()


def _owned(folder: Path) -> int | None:
    """The lock of a folder, which has its name only once it is held: else it could be swept before."""
    if not HAS_LOCKS:
        return None
    new = folder / f"{_OWNER}-new"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _OWNER)
    except OSError:
        os.close(fd)
        raise
    return fd


def sweep(where: Path | None = None, prefix: str = PREFIX) -> int:
    """Remove our own folders whose processes have ended; how many."""
    if not HAS_LOCKS:
        return 0
    with suppress(OSError), os.scandir(where or tempfile.gettempdir()) as entries:
        ours = [Path(one.path) for one in entries if one.name.startswith(prefix) and _is_ours(one)]
        return sum(map(_swept, ours))
    return 0


def _is_ours(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False


def _swept(folder: Path) -> bool:
    """Remove a folder unless its owner lives; one without an owner's file is not ours to judge."""
    try:
        fd = os.open(folder / _OWNER, os.O_RDWR | NO_FOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # BlockingIOError: it lives
        return False
    finally:
        os.close(fd)
    return True
