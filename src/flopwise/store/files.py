"""The file system under the runs: where they lie, locks, and its errors in one line."""

import contextlib
import errno
import importlib.util
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from flopwise.atomic import NO_FOLLOW, write_all, write_atomically
from flopwise.errors import FlopwiseError

HAS_LOCKS = importlib.util.find_spec("fcntl") is not None  # not on Windows: runs are written without a lock there
if HAS_LOCKS:
    import fcntl

HEADER, POINTS, LOCK, TAGS, LOGS, TRACES = "run.json", "points.jsonl", "lock", "tags.json", "logs", "traces"
MEMORY = "memory"
LAB = "lab.jsonl"  # a run of the lab has its experiments there
TUNING = "tuning.jsonl"  # of a run of tune: how it began, every lever, how it ended
TRAINING = "training.jsonl"  # of a run of train: its settings, its steps, how it ended
LAB_RUNNING = "lab-running.jsonl"  # while an experiment runs, its rows so far
BUILDING, REMOVED = ".new-", ".removed-"  # hidden names: what a killed process may leave next to the runs

_HOME = ".flopwise"
_ELSEWHERE = "set FLOPWISE_RUNS to a folder you can write to"
_HINTS = {
    errno.ENOSPC: "free some space, or set FLOPWISE_RUNS to another disk; what was written before is kept",
    errno.EDQUOT: "free some of your quota, or set FLOPWISE_RUNS to another disk; what was written before is kept",
    errno.ENOTDIR: f"a file stands where a folder should be: move it, or {_ELSEWHERE}",
    errno.EEXIST: f"a file stands where a folder should be: move it, or {_ELSEWHERE}",
    errno.ELOOP: "a link stands where flopwise writes a file of its own: remove it",
    errno.ENOENT: "it may have been removed meanwhile; flopwise runs lists what there is",
}
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems


class BusyError(Exception):
    """Another process holds the lock."""


def runs_root(explicit: str | Path | None = None) -> Path:
    """Where runs are kept: the place given, else FLOPWISE_RUNS, else ./.flopwise/runs. Nothing is created yet.

    >>> runs_root("results").as_posix()
    'results'
    """
    given = str(explicit or os.environ.get("FLOPWISE_RUNS") or Path(_HOME, "runs"))
    try:
        if "\0" in given:
            raise RuntimeError("it holds a null character")
        return Path(given).expanduser()
    except RuntimeError as error:
        raise FlopwiseError(f"'{given}' cannot be a folder of runs: {error}", _ELSEWHERE) from None


def make_root(root: Path) -> None:
    """Create the folder of runs. A `.flopwise` made here is kept out of git; one that was there is left as it is."""
    home = root.parent
    if home.name == _HOME and not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            home.mkdir()
            (home / ".gitignore").write_text("*\n")
    root.mkdir(parents=True, exist_ok=True)


def check_root(root: Path) -> None:
    """Raise unless runs can be created in this folder, or it itself; nothing is left behind."""
    try:
        there = next(folder for folder in (root, *root.absolute().parents) if os.path.lexists(folder))
        probe = there / f"{BUILDING}{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FlopwiseError(f"cannot create a run in {root}: {reason}", _ELSEWHERE) from None


@contextlib.contextmanager
def explain_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an error of the file system into one line and a hint."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FlopwiseError(f"cannot {doing} {path}: {reason}", _HINTS.get(error.errno or 0, _ELSEWHERE)) from None


def write_output(path: Path, text: str) -> None:
    """Write a file that a user named, whole or not at all: through links, and straight into what is no file, as a pipe."""
    place, content = Path(os.path.realpath(path)), text.encode("utf-8", errors="backslashreplace")
    if not place.exists() or place.is_file():
        write_atomically(place, content)
        return
    fd = os.open(place, os.O_WRONLY)
    try:
        write_all(fd, content)
    finally:
        os.close(fd)


def refuse_links(*paths: Path) -> None:
    """Raise if one of these is a link: what others write by these names would follow it."""
    for path in paths:
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def read_limited(path: Path, limit: int) -> bytes:
    """A plain file's bytes; anything else (a pipe would wait for ever) and anything larger than `limit` is refused."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FlopwiseError(f"{path} is not a plain file", "a run is a folder that flopwise wrote")
    if found.st_size > limit:
        raise FlopwiseError(f"{path} is larger than {limit >> 20} MiB", "flopwise writes no such file")
    return path.read_bytes()


def lock_run(folder: Path, hint: str) -> int | None:
    """A run's lock, or one line that another process has it, with this hint."""
    try:
        return take_lock(folder / LOCK)
    except BusyError:
        raise FlopwiseError(f"{folder} is being written by another process", hint) from None


def take_lock(path: Path, wait_s: float = 0.3) -> int | None:
    """Lock a file until its descriptor is closed, which the system does for a killed process too.

    Raises BusyError when another holds it for longer than `wait_s`; `is_locked` itself holds it for an instant.
    None where the system has no such locks: the run is then written without one.
    """
    if not HAS_LOCKS:
        return None
    deadline = time.monotonic() + wait_s
    fd = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError from None
                time.sleep(0.01)
        if not os.path.samestat(os.fstat(fd), path.stat()):  # removed and made anew while we waited
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            return None
        raise
    return fd


def is_locked(path: Path) -> bool:
    """Whether a writer holds this lock now. Needs no right to write."""
    if not HAS_LOCKS:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False  # no lock file: no writer
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def release(lock: int | None) -> None:
    """Give a lock back."""
    if lock is not None:
        os.close(lock)
