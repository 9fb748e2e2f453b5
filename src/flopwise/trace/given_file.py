"""The file that a user named: there, and a regular one. A pipe would be waited for, a folder cannot be read."""

import os
from pathlib import Path

from flopwise.errors import FlopwiseError

SQLITE_MAGIC = b"SQLite format 3\0"


def check_file(path: Path, hint: str) -> None:
    """Raise if there is no such file; `hint` says what would be read."""
    if os.path.isfile(path):
        return
    if os.path.isdir(path):
        raise FlopwiseError(f"cannot open {path}: it is a folder, not a file", hint)
    if os.path.exists(path):
        raise FlopwiseError(f"cannot open {path}: it is not a file", f"write it to a file first; {hint}")
    if os.path.islink(path):
        raise FlopwiseError(
            f"cannot open {path}: it is a link to {os.readlink(path)}, which is not there", "mend the link"
        )
    if _too_long(path):
        raise FlopwiseError(f"cannot open {str(path)[:100]}…: the name is too long for a file", hint)
    raise FlopwiseError(f"cannot open {path}: there is no such file", f"check the path; {hint}")


def _too_long(path: Path) -> bool:
    return len(os.fsencode(path.name)) > 255 or len(os.fsencode(path)) > 4095  # NAME_MAX, PATH_MAX
