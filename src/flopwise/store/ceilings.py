"""A machine's measured ceilings, kept between runs: one small file a GPU, in the user's cache folder."""

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from flopwise.errors import FlopwiseError, one_line
from flopwise.records.ceilings import Ceilings

VARIABLE = "FLOPWISE_CEILINGS"  # another folder
_LARGEST_BYTES = 4 << 20


def ceilings_folder() -> Path:
    """Where ceilings are kept: $FLOPWISE_CEILINGS, else flopwise/ceilings in the user's cache folder."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "flopwise" / "ceilings"


def check_writable() -> None:
    """Say before a minute of measuring that its result could not be kept."""
    folder = ceilings_folder()
    probe = folder / f".{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise _cannot_keep(folder, error) from None


def _cannot_keep(folder: Path, error: OSError) -> FlopwiseError:
    return FlopwiseError(f"cannot keep the ceilings in {folder}: {error.strerror}", f"set {VARIABLE} to another folder")


def save_ceilings(ceilings: Ceilings) -> Path:
    """Keep a machine's ceilings; the ones it had before are replaced, whole or not at all."""
    target = _path(ceilings.gpu)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(ceilings))
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise _cannot_keep(target.parent, error) from None
    return target


def load_ceilings(gpu: str) -> Ceilings | None:
    """What was measured on this kind of GPU, if it was; a file that is damaged says so in one line."""
    path = _path(gpu)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ValueError("it is too large")
        found = msgspec.json.decode(path.read_bytes(), type=Ceilings)
        if _path(found.gpu) != path:
            raise ValueError(f"they are those of {one_line(found.gpu, 60)}")
        return msgspec.structs.replace(found, file=str(path))
    except (FileNotFoundError, NotADirectoryError):
        _check_named_folder()
        return None
    except OSError as error:
        raise FlopwiseError(f"cannot read {path}: {error.strerror}", "see who may read it") from None
    except ValueError as error:
        raise FlopwiseError(
            f"{path} holds no ceilings: {error}", "delete it, and run flopwise doctor --calibrate again"
        ) from None


def _check_named_folder() -> None:
    """A folder that was named and is a file is a slip; one that is not there yet is made by the first calibration."""
    if os.environ.get(VARIABLE) and (folder := ceilings_folder()).is_file():
        raise FlopwiseError(
            f"{VARIABLE} = {folder} is a file, not a folder",
            "name a folder of ceilings, or leave it unset; doctor --calibrate makes one",
        )


def _path(gpu: str) -> Path:
    return ceilings_folder() / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")[:100] + ".json")
