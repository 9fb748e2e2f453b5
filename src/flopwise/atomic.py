"""Files written whole or not at all, whatever happens meanwhile."""

import contextlib
import os
import secrets
from pathlib import Path

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # a link where a file of ours should be is not written through


def write_atomically(path: Path, text: bytes) -> None:
    """Write a file so that a reader, at any moment and after any crash, sees all of it or the old content."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_new(temporary, text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_new(path: Path, text: bytes) -> None:
    """Write a file that does not exist yet, through to the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        write_all(fd, text)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, text: bytes) -> None:
    """One write; the kernel takes less than all of it only near a full disk or beyond 2 GiB: then the rest follows."""
    done = os.write(fd, text)
    while done < len(text):
        done += os.write(fd, text[done:])


def sync_folder(path: Path) -> None:
    """Make a rename in a folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no folders; some network file systems sync none
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
