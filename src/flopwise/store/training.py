"""A run of `train` read back."""

from pathlib import Path

from flopwise.errors import Damaged, FlopwiseError
from flopwise.records.training import UNFINISHED, Begun, Row, Settings, Steps, Stopped, Training
from flopwise.store import StoredRun, files, find, runs_root
from flopwise.store.rows import Table, read_rows

ROWS = files.TRAINING
CORPUS = "corpus"  # the folder in a run that text is prepared into


def corpus_folder(run: Path, settings: Settings) -> Path:
    """Where a training's corpus is: in its run, which may have been moved since, or where it was said to be."""
    own = run.resolve() / CORPUS
    return own if own.is_dir() or not settings.data else Path(settings.data).expanduser()


def _steps(rows: list[Row]) -> tuple[Steps, ...]:
    steps = list[Steps]()
    for row in rows:
        if isinstance(row, Begun):
            steps = [one for one in steps if one.step <= row.step]
        elif isinstance(row, Steps):
            steps.append(row)
    return tuple(steps)


def read_training(target: str | Path | StoredRun, runs: str | Path | None = None) -> Training:
    """A training that was begun before; of steps that a resumed one took again, the later."""
    stored = target if isinstance(target, StoredRun) else StoredRun.load(find(target, runs_root(runs)))
    path, header = stored.path, stored.header
    if header.kind != "train":
        raise FlopwiseError(f"{path.name} is a run of {header.kind}, not of train", "flopwise runs lists what there is")
    table: Table[Row] = read_rows(path / ROWS, Row, "steps") if (path / ROWS).is_file() else Table()  # type: ignore[arg-type]
    rows = table.rows
    begun = [row for row in rows if isinstance(row, Begun)]
    if not begun or not header.trials:
        if table.warnings:
            raise Damaged(f"{path.name} cannot be shown: {table.warnings[0]}", "train again")
        raise FlopwiseError(f"{path.name} ended before the first step", "train again")
    last = rows[-1] if isinstance(rows[-1], Stopped) else None
    return Training(
        path=path,
        header=header,
        begun=begun[-1],
        before=tuple(begun[:-1]),
        steps=_steps(rows),
        status=last.status if last is not None else UNFINISHED,
        reason=last.reason if last is not None else "",
        warnings=(*stored.warnings, *table.warnings),
    )
