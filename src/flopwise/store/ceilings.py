"""A machine's measured ceilings, kept between runs: one small file a GPU, in the user's cache folder."""

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from flopwise.ceilings import Ceilings
from flopwise.errors import FlopwiseError

VARIABLE = "FLOPWISE_CEILINGS"  # another folder
_LARGEST_BYTES = 4 << 20


def ceilings_folder() -> Path:
    """Where ceilings are kept: $FLOPWISE_CEILINGS, else flopwise/ceilings in the user's cache folder."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "flopwise" / "ceilings"


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
        raise FlopwiseError(
            f"cannot keep the ceilings in {target.parent}: {error.strerror}", f"set {VARIABLE} to another folder"
        ) from None
    return target


def load_ceilings(gpu: str) -> Ceilings | None:
    """What was measured on this kind of GPU, if it was; a file that is damaged says so in one line."""
    path = _path(gpu)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ValueError("it is too large")
        return msgspec.json.decode(path.read_bytes(), type=Ceilings)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FlopwiseError(f"cannot read {path}: {error.strerror}", "see who may read it") from None
    except ValueError as error:
        raise FlopwiseError(
            f"{path} holds no ceilings: {error}", "delete it, and run flopwise doctor --calibrate again"
        ) from None


def _path(gpu: str) -> Path:
    return ceilings_folder() / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")[:100] + ".json")
