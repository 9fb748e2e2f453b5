"""Checks on a file that a user named: it must be a regular one. A pipe would block, a folder cannot be read."""

import os
from pathlib import Path

from flopwise.errors import FlopwiseError

SQLITE_MAGIC = b"SQLite format 3\0"
GZIP_MAGIC = b"\x1f\x8b"


def check_file(path: Path, hint: str) -> None:
    """Raise unless `path` is a regular file; `hint` says which files are accepted."""
    if os.path.isfile(path):
        return
    if os.path.isdir(path):
        problem = "it is a folder, not a file"
    elif os.path.exists(path):
        problem, hint = "it is not a regular file", f"write it to a file first; {hint}"
    elif os.path.islink(path):
        problem, hint = f"it is a link to {os.readlink(path)}, which does not exist", "fix the link"
    elif len(os.fsencode(path.name)) > 255 or len(os.fsencode(path)) > 4095:  # NAME_MAX, PATH_MAX
        raise FlopwiseError(f"cannot open {str(path)[:100]}…: the name is too long for a file", hint)
    else:
        problem, hint = "there is no such file", f"check the path; {hint}"
    raise FlopwiseError(f"cannot open {path}: {problem}", hint)
