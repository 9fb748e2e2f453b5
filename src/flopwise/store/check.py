"""Whether runs are as they were written, and what can be done about those that are not."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from flopwise.atomic import write_atomically
from flopwise.errors import FlopwiseError
from flopwise.records.run import Point, RunHeader
from flopwise.store import files
from flopwise.store.rows import read_table, repair_table
from flopwise.store.seals import sealed
from flopwise.store.stored import begun_ns, header_damage, read_header
from flopwise.store.sums import SUMS, TABLES, damaged_files, read_sums, write_sums
from flopwise.store.tags import read_tags, write_tags

_ID = re.compile(r"\d{8}-\d{6}-([A-Za-z0-9.]+)-?(.*?)-?[0-9a-f]{4}")


class RunCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one run, and what was done about it."""

    id: str
    damage: tuple[str, ...] = ()  # what is still wrong
    repaired: tuple[str, ...] = ()  # what a repair took out or made anew, now or before
    checked_files: int = 0  # whose checksums are known; a run of an earlier version has none


def check_run(path: Path, repair: bool = False) -> RunCheck:
    """Read all of a run. With `repair`, what is damaged is taken out of its tables, and kept beside them."""
    if repair and _damage(path):
        _repair(path)
    sums = read_sums(path)
    return RunCheck(
        id=path.name,
        damage=tuple(_damage(path)),
        repaired=sums.repaired,
        checked_files=len(sums.files) + len(sums.tables),
    )


def _damage(path: Path) -> list[str]:
    sums = read_sums(path)
    found = list[str]()
    try:
        read_header(path)
        found += header_damage(path, sums)
    except FlopwiseError as error:
        found.append(error.message)
    for name in _tables(path):
        found += [f"{name} is a link to another file"] if (path / name).is_symlink() else []
        found += read_table(path / name, _form(name)).warnings
    found += [line for line in damaged_files(path, sums) if not line.startswith(f"{files.HEADER} ")]
    return [*found, *read_tags(path).warnings]


def _tables(path: Path) -> list[str]:
    known = read_sums(path).tables
    return [name for name in TABLES if name == files.POINTS or (path / name).exists() or name in known]


def _form(table: str) -> Any:
    return Point if table == files.POINTS else dict[str, Any]


def _repair(path: Path) -> None:
    with files.explain_errors("repair", path):
        lock = files.lock_run(path, "wait until it ends")
        try:
            done = [*read_sums(path).repaired, *_repair_header(path)]
            for name in _tables(path):
                done += repair_table(path / name, _form(name))
            if read_tags(path).warnings:
                write_tags(path, ())
                done.append(f"{files.TAGS} was damaged: the run has no tags now")
            raw = (line for line in damaged_files(path, read_sums(path)) if not line.startswith(f"{files.HEADER} "))
            done += [f"repaired: {line}; it is taken as it is now" for line in raw]
            (path / SUMS).unlink(missing_ok=True)
            write_sums(path, tuple(dict.fromkeys(done)))
        finally:
            files.release(lock)


def _repair_header(path: Path) -> list[str]:
    """Seal a header that can be read as it is now; make another from the id and the rows where it cannot."""
    file = path / files.HEADER
    try:
        header = read_header(path)
        if not header_damage(path, msgspec.structs.replace(read_sums(path), problem="")):
            return []
        said = f"repaired: {files.HEADER} was damaged; its name, command and plan may be wrong"
    except FlopwiseError as error:
        named = _ID.fullmatch(path.name)
        if named is None or not file.is_file():
            raise
        rows = read_table(path / files.POINTS, Point).rows
        begun = begun_ns(path.name)
        header = RunHeader(
            id=path.name,
            kind=named[1],
            name=named[2],
            created_at=datetime.fromtimestamp(begun // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            created_ns=begun,
            trials=tuple({row.key: row.trial for row in rows}.values()),
        )
        said = f"repaired: {error.message}: made anew from its rows, without points that have none"
    write_atomically(file, sealed(msgspec.json.encode(header))[0])
    return [said]
