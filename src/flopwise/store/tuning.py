"""A tuning read back from its run."""

from pathlib import Path

from flopwise.errors import Damaged, FlopwiseError
from flopwise.records.tuning import Attempt, Begun, Ended, Row, Tuning
from flopwise.store import StoredRun, files, find, runs_root
from flopwise.store.rows import Table, read_rows

ROWS = files.TUNING


def read_tuning(target: str | Path | StoredRun, runs: str | Path | None = None) -> Tuning:
    """A tuning that was run before."""
    path, of_run = (target.path, target.warnings) if isinstance(target, StoredRun) else (Path(target), ())
    if not (path / ROWS).is_file() and not isinstance(target, StoredRun):
        path = find(target, runs_root(runs))
    table: Table[Row] = read_rows(path / ROWS, Row, "tuning")  # type: ignore[arg-type]
    rows = table.rows
    begun = [row for row in rows if isinstance(row, Begun)]
    if not begun:
        if table.warnings:
            raise Damaged(f"{path.name} cannot be shown: {table.warnings[0]}", "tune again")
        raise FlopwiseError(f"{path.name} ended before the first measurement", "tune again")
    ends = [row for row in rows if isinstance(row, Ended)]
    return Tuning(
        run=path.name,
        begun=begun[0],
        attempts=tuple(row for row in rows if isinstance(row, Attempt)),
        ended=ends[-1] if ends else None,
        warnings=tuple(dict.fromkeys((*of_run, *table.warnings))),
    )
