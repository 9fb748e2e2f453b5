"""Files that a capture was writing when it was killed: `partial-…` in a run's folder of traces."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from flopwise.store import files

PARTIAL = "partial-"


def sweep_partials(root: Path) -> int:
    """Remove those of every run that no process writes; how many."""
    removed = 0
    with suppress(OSError), os.scandir(root) as runs:
        for run in [Path(one.path) for one in runs if one.is_dir(follow_symlinks=False)]:
            if _partials(run) and not files.is_locked(run / files.LOCK):
                removed += remove_partials(run)
    return removed


def remove_partials(run: Path) -> int:
    """Remove those of a run that only this process may write."""
    return sum(map(_remove, _partials(run)))


def _partials(run: Path) -> list[Path]:
    folder = run / files.TRACES
    with suppress(OSError):
        if not folder.is_symlink():
            return [folder / name for name in os.listdir(folder) if name.startswith(PARTIAL)]
    return []


def _remove(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
    return not path.exists()
