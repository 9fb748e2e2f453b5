"""Whether runs are as they were written, and what can be done about those that are not."""

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from flopwise.atomic import write_atomically
from flopwise.errors import FlopwiseError
from flopwise.records.run import Point
from flopwise.store import files
from flopwise.store.rows import read_table, repair_table
from flopwise.store.seals import sealed
from flopwise.store.stored import header_damage, header_from_rows, read_header
from flopwise.store.sums import SUMS, TABLES, damaged_files, read_sums, write_sums
from flopwise.store.tags import read_tags, write_tags


class RunCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one run, and what was done about it."""

    id: str
    damage: tuple[str, ...] = ()  # what is still wrong
    repaired: tuple[str, ...] = ()  # what a repair took out or made anew, now or before
    checked_files: int = 0  # whose checksums are known; a run of an earlier version has none


def check_run(path: Path, repair: bool = False) -> RunCheck:
    """Read all of a run. With `repair`, what is damaged is taken out of its tables, and kept beside them."""
    try:
        if repair and _damage(path):
            _repair(path)
        damage = _damage(path)
    except FlopwiseError as error:  # the others are looked at all the same
        damage = [error.message]
    sums = read_sums(path)
    return RunCheck(
        id=path.name, damage=tuple(damage), repaired=sums.repaired, checked_files=len(sums.files) + len(sums.tables)
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
            done = [*read_sums(path).repaired, *_set_aside(path), *_repair_header(path)]
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


def _set_aside(path: Path) -> list[str]:
    """Give what is no file, a folder or a link in the place of one, another name."""
    places = [path / name for name in (files.HEADER, files.TAGS, SUMS, *_tables(path))]
    done = []
    for place in places:
        if os.path.lexists(place) and not place.is_file():
            aside = place.with_name(f"{place.stem}.damaged-{secrets.token_hex(4)}")
            place.rename(aside)
            done.append(f"repaired: {place.name} was no plain file: it is {aside.name} now")
    return done


def _repair_header(path: Path) -> list[str]:
    """Seal a header that can be read as it is now; make another from the id and the rows where it cannot."""
    file = path / files.HEADER
    try:
        header = read_header(path)
        if not header_damage(path, msgspec.structs.replace(read_sums(path), problem="")):
            return []
        said = f"repaired: {files.HEADER} was damaged; its name, command and plan may be wrong"
    except FlopwiseError as error:
        known = header_from_rows(path)
        if known is None:
            raise
        header = known
        said = f"repaired: {error.message}: made anew from its rows, without points that have none"
    write_atomically(file, sealed(msgspec.json.encode(header))[0])
    return [said]
