"""A copy of a trace that is safe to share: what an analysis needs, and nothing that identifies the machine or its user."""

import errno
import gzip
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.scrub.kineto import scrub_kineto
from flopwise.scrub.nsys import scrub_nsys
from flopwise.trace.input_file import GZIP_MAGIC, SQLITE_MAGIC, check_file
from flopwise.trace.nsys_file import REPORT_SUFFIXES


def scrub(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write a scrubbed copy of a trace of either profiler to `out`, compressed if that ends in .gz; the input stays as it is."""
    source, target = Path(path), Path(out)
    try:
        check_file(source, "give the trace that is to be copied: .json, .json.gz, .sqlite, .sqlite.gz or .nsys-rep")
        _refuse_to_replace(source, target)
        is_nsys = _is_nsys(source)
        _check_suffix(target, ".sqlite" if is_nsys else ".json")
        with _whole_file(target) as building:
            plain = building.with_name(building.name + ".plain") if target.suffix == ".gz" else building
            try:
                _write(source, plain, is_nsys)
                if plain != building:
                    _compress(plain, building)
            finally:
                if plain != building:
                    plain.unlink(missing_ok=True)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        hint = (
            "free some space, or give -o another disk"
            if full
            else "check that you may read the one and write the other"
        )
        raise FlopwiseError(f"cannot scrub {source} to {target}: {error.strerror or error}", hint) from error
    return target


def _write(source: Path, target: Path, is_nsys: bool) -> None:
    if is_nsys:
        scrub_nsys(source, target)
        return
    with target.open("xb") as file:
        scrub_kineto(source, file)


def _refuse_to_replace(source: Path, target: Path) -> None:
    if not os.path.isdir(target.parent):
        problem = f"cannot write {target}: there is no folder {target.parent}"
        raise FlopwiseError(problem, "make the folder first, or write elsewhere")
    if not os.path.lexists(target):
        return
    if target.exists() and target.samefile(source):
        raise FlopwiseError(f"{target} is the file to scrub; it would be lost", "give the copy another name")
    raise FlopwiseError(f"{target} exists already", "give the copy another name, or remove that file first")


def _is_nsys(path: Path) -> bool:
    """By the first bytes, unpacked; a report by its name."""
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(GZIP_MAGIC):
        try:
            with gzip.open(path) as file:
                head = file.read(16)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FlopwiseError(f"{path.name} is a damaged gzip file: {error}", "copy it again") from error
    return head.startswith(SQLITE_MAGIC) or path.suffix in REPORT_SUFFIXES


def _check_suffix(target: Path, suffix: str) -> None:
    """The readers and other people go by the name."""
    if not target.name.endswith((suffix, suffix + ".gz")):
        problem = f"the copy of this trace is a {suffix} file, not {target.name}"
        raise FlopwiseError(problem, f"name it {target.stem}{suffix}.gz")


@contextmanager
def _whole_file(target: Path) -> Iterator[Path]:
    """A file beside the target that becomes it when all is written, or disappears."""
    building = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield building
        os.replace(building, target)
    finally:
        building.unlink(missing_ok=True)


def _compress(plain: Path, target: Path) -> None:
    with (
        plain.open("rb") as source,
        target.open("xb") as raw,
        # no name and no time in the header
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) as out,
    ):
        shutil.copyfileobj(source, out, 1 << 20)
