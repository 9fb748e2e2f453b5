"""A run being written: a header first, then one row per measured point, each on the disk before the next begins."""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

import msgspec

from flopwise.atomic import NO_FOLLOW, sync_folder, write_atomically, write_new
from flopwise.errors import FlopwiseError
from flopwise.records.run import Point, RunHeader
from flopwise.spec.workload import Trial
from flopwise.store import files
from flopwise.store.partials import remove_partials, sweep_partials
from flopwise.store.rows import MAX_ROW_BYTES, UNREADABLE, Appender, read_table, repair_table
from flopwise.store.seals import sealed
from flopwise.store.stored import LAB_KIND, MAX_HEADER_BYTES, TRAIN_KIND, TUNE_KIND, RowHead, read_header
from flopwise.store.sums import read_sums, write_sums

_POINT = msgspec.json.Decoder(Point)
_TABLES = {TUNE_KIND: files.TUNING, TRAIN_KIND: files.TRAINING, LAB_KIND: files.LAB}  # of other kinds: the points


class Run:
    """An open run. One process writes it; a killed one leaves every row it had appended.

    with Run.create(root, "bench", "small", command, trials) as run:
        run.append(point)
    """

    def __init__(self, path: Path, header: RunHeader, lock: int | None) -> None:
        """Use `create` or `reopen`."""
        self.path, self.header = path, header
        self._lock = lock
        # Without a lock, what follows a row might be another writer's.
        self._table: Appender | None = Appender(path / files.POINTS, alone=lock is not None)
        self._new = False

    @classmethod
    def create(cls, root: str | Path, kind: str, name: str, command: str, trials: Sequence[Trial]) -> Self:
        """Begin a run under `root`. Its folder appears whole (header, empty table, lock held) or not at all."""
        root = Path(root)
        with files.explain_errors("create a run in", root):
            files.make_root(root)
            sweep_partials(root)
            now_ns = time.time_ns()
            header = RunHeader(
                id=_new_id(root, now_ns, kind, name),
                kind=kind,
                name=_encodable(name),
                created_at=datetime.fromtimestamp(now_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                created_ns=now_ns,
                command=_encodable(command),
                trials=tuple(trials),
            )
            text, _ = sealed(msgspec.json.encode(header))
            if len(text) > MAX_HEADER_BYTES:
                allowed = f"allowed: up to {MAX_HEADER_BYTES >> 20} MiB"
                raise FlopwiseError(f"the plan of this run has {len(text) >> 20} MiB", allowed)
            building, path = root / f"{files.BUILDING}{header.id}", root / header.id
            lock = None
            try:
                building.mkdir()
                write_atomically(building / files.HEADER, text)
                write_new(building / files.POINTS, b"")
                lock = files.take_lock(building / files.LOCK)
                sync_folder(building)
                os.rename(building, path)
                sync_folder(root)
                run = cls(path, header, lock)
                run._new = True
                return run
            except BaseException:
                files.release(lock)
                shutil.rmtree(building, ignore_errors=True)
                raise

    @classmethod
    def reopen(cls, path: str | Path) -> Self:
        """Go on with a run. A torn last row is cut away, and its bytes are kept in `points.torn-<n>` (or `training.torn-<n>`)."""
        path = Path(path)
        header = read_header(path)
        with files.explain_errors("write to", path):
            lock = files.lock_run(path, "wait until it ends, or begin a new run")
            try:
                remove_partials(path)
                for table, form in ((files.POINTS, RowHead), (files.TRAINING, dict)):
                    _cut_torn_tail(path / table, form)
                taken_out = repair_table(path / files.POINTS, RowHead)  # what was lost is measured again
                write_sums(path, (*read_sums(path).repaired, *taken_out) if taken_out else None)
                return cls(path, header, lock)
            except BaseException:
                files.release(lock)
                raise

    @property
    def id(self) -> str:
        """The run's id, also its folder's name."""
        return self.path.name

    def append(self, point: Point) -> None:
        """Add a row. When this returns, the row is on the disk; when it raises, the table reads as before."""
        if self._table is None:
            raise FlopwiseError(f"{self.path} is closed", "reopen the run to append to it")
        with files.explain_errors("write to", self.path):
            self._table.append(_encode(point))
            if point.trace_file or point.memory_file:  # a kill leaves them as they are now
                write_sums(self.path)

    def log_path(self, key: str) -> Path:
        """Where the worker that measures `key` writes its log; the folder is there."""
        return self._file_in(files.LOGS, f"{key}.log")

    def trace_path(self, name: str) -> Path:
        """Where a raw trace called `name` belongs; the folder is there."""
        return self._file_in(files.TRACES, name)

    def memory_path(self, name: str) -> Path:
        """Where a memory snapshot called `name`, and what is known of it, belongs; the folder is there."""
        return self._file_in(files.MEMORY, name)

    def _file_in(self, folder: str, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", name):
            raise FlopwiseError(f"'{name}' cannot name a file", "allowed: up to 128 letters, digits, dots, _ and -")
        with files.explain_errors("write to", self.path / folder):
            (self.path / folder).mkdir(exist_ok=True)
            files.refuse_links(self.path / folder, self.path / folder / name)
        return self.path / folder / name

    def close(self) -> None:
        """Close the table and give the lock back. Closing twice does nothing."""
        table, self._table = self._table, None
        lock, self._lock = self._lock, None
        if table is not None:
            table.close()
            write_sums(self.path)
        files.release(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if self._new and kind is not None and issubclass(kind, KeyboardInterrupt):
            self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Of a run that was stopped before its first row nothing stays."""
        table = self.path / _TABLES.get(self.header.kind, files.POINTS)
        if not table.exists() or not table.stat().st_size:
            away = self.path.with_name(f"{files.REMOVED}{self.id}-{secrets.token_hex(4)}")
            with contextlib.suppress(OSError):
                os.rename(self.path, away)
                shutil.rmtree(away)


def receive(root: str | Path, contents: Mapping[str, bytes]) -> Path:
    """A run that another machine has made, whole, under `root`: every file by its path, which begins with the run's id."""
    root, ids = Path(root), {PurePosixPath(name).parts[0] for name in contents}
    safe = all(not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts for name in contents)
    if len(ids) != 1 or not safe or f"{(run := ids.pop())}/{files.HEADER}" not in contents:
        raise FlopwiseError("what arrived is not a run", "is the same flopwise on both machines?")
    with files.explain_errors("create a run in", root):
        files.make_root(root)
        building = root / f"{files.BUILDING}{run}"
        for name, content in contents.items():
            place = root / f"{files.BUILDING}{name}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        building.rename(root / run)
    return root / run


def _new_id(root: Path, now_ns: int, kind: str, name: str) -> str:
    """`20261115-021530-bench-small-3f2a`: sorts by time, says what it is, and is not taken."""
    time_utc = datetime.fromtimestamp(now_ns // 10**9, UTC).strftime("%Y%m%d-%H%M%S")
    words = [re.sub(r"[^A-Za-z0-9.]+", "-", word)[:40].strip("-.") for word in (kind, name)]
    for _ in range(100):
        new = "-".join(word for word in (time_utc, *words, secrets.token_hex(2)) if word)
        if not (root / new).exists() and not (root / f"{files.BUILDING}{new}").exists():
            return new
    raise FlopwiseError(f"{root} holds too many runs begun in this second", "try again")


def _encodable(text: str) -> str:
    """Text that UTF-8 can hold: a command line may carry bytes that are not text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _encode(point: Point) -> bytes:
    """A point as one line, checked to be readable: a row that cannot be read again would be lost silently."""
    try:
        row = msgspec.json.encode(point)
        _POINT.decode(row)
    except UNREADABLE as error:
        hint = "one of its values cannot be written as JSON"
        raise FlopwiseError(f"point {point.key} cannot be stored: {error}", hint) from None
    if len(row) > MAX_ROW_BYTES:
        allowed = f"allowed: up to {MAX_ROW_BYTES >> 20} MiB; take fewer samples"
        raise FlopwiseError(f"point {point.key} has {len(row) >> 20} MiB of samples", allowed)
    return row


def _cut_torn_tail(points: Path, form: Any) -> None:
    """Cut a table back to its last whole row. The bytes are copied aside first: a kill in between loses nothing."""
    if not points.exists():
        return
    with open(points, "rb+", opener=lambda path, flags: os.open(path, flags | NO_FOLLOW)) as table:
        end = read_table(points, form).end
        table.seek(end)
        aside = _first_free(points)
        with contextlib.ExitStack() as stack:
            torn = None
            while chunk := table.read(2**20):
                torn = torn or stack.enter_context(aside.open("xb"))
                torn.write(chunk)
            if torn is None:
                return
            torn.flush()
            os.fsync(torn.fileno())
        sync_folder(points.parent)
        table.truncate(end)
        os.fsync(table.fileno())


def _first_free(points: Path) -> Path:
    number = 1
    while (free := points.with_name(f"{points.stem}.torn-{number}")).exists():
        number += 1
    return free
