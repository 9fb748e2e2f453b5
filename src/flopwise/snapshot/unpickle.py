"""Pickles from outside, read without running any of them.

Two walls: `opcodes.check` admits only opcodes that build dicts, lists, tuples, numbers, strings, bools and None; and the
unpickler behind it loads no global and no persistent object, whatever reaches it.
"""

import gc
import gzip
import io
import pickle
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.snapshot.opcodes import HINT, check, truncated

MOST_BYTES = 2 * 2**30  # of the pickle, after gzip
_CHUNK = 2**20
_GZIP, _ZIP, _PROTO = b"\x1f\x8b", b"PK\x03\x04", 0x80


class _PlainUnpickler(pickle.Unpickler):
    """Loads nothing by name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it tries to load {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it tries to load a persistent object")


@contextmanager
def without_collector() -> Iterator[None]:
    """A million new containers and no garbage: without this, looking for garbage takes twice as long as the reading."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def read_pickle(path: str | Path, most_bytes: int = MOST_BYTES) -> Any:
    """What a pickle of plain data holds, gzipped or not; anything else is refused in one line."""
    path = Path(path)
    return unpickled(_content(path, most_bytes), path.name)


def unpickled(pickled: bytes, name: str) -> Any:
    """The plain data in a pickle.

    >>> import pickle
    >>> unpickled(pickle.dumps({"segments": [1, 2.5, None, ("a", True)]}), "x")
    {'segments': [1, 2.5, None, ('a', True)]}
    """
    if pickled and pickled[0] != _PROTO and _is_old(pickled):
        raise FlopwiseError(
            f"{name} is refused: an old pickle protocol (0 or 1), which no snapshot is written in", HINT
        )
    if not pickled or pickled[0] != _PROTO:
        raise FlopwiseError(f"{name} is not a memory snapshot: {_kind(pickled)}", HINT)
    check(pickled, name)
    try:
        # Buffered, because only a stream that can peek is read in blocks where the pickle has no frames.
        with without_collector():
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(pickled), _CHUNK)).load()
    except EOFError:
        raise truncated(name) from None
    except MemoryError:
        raise FlopwiseError(f"{name} does not fit into this machine's memory", "record fewer events") from None
    except (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise FlopwiseError(f"{name} is damaged or not a snapshot: {error}", HINT) from None


def _content(path: Path, most_bytes: int) -> bytes:
    too_large = FlopwiseError(
        f"{path.name} is larger than {units.size(most_bytes)} unpacked",
        "record fewer events: torch.cuda.memory._record_memory_history(max_entries=200000)",
    )
    try:
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if head == _GZIP else file as stream:
                parts: list[bytes] = []
                left = most_bytes
                while part := stream.read(_CHUNK):
                    left -= len(part)
                    if left < 0:
                        raise too_large
                    parts.append(part)
    except EOFError:
        raise truncated(path.name) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FlopwiseError(f"{path.name} is damaged: {error}", "copy it again, whole") from None
    except FileNotFoundError:
        raise FlopwiseError(f"there is no file {path}", HINT) from None
    except OSError as error:
        raise FlopwiseError(f"cannot read {path}: {error.strerror or error}", "is it a file you may read?") from None
    return b"".join(parts)


def _is_old(content: bytes) -> bool:
    """Whether it begins and ends as pickles of protocol 0 and 1 do, which have no mark of their own: `(dp0 … .`, `}q\x00 … .`."""
    return re.match(
        rb"\((?:[dl]p\d+\n|i|c)|[}\])]q.|c\w[\w.]*\n", content, re.DOTALL
    ) is not None and content.rstrip().endswith(b".")


def _kind(content: bytes) -> str:
    """What a file is that is no pickle, by its first bytes."""
    start = content[:256].lstrip()
    if not content:
        return "the file is empty"
    if content.startswith(_ZIP):
        return "it is a zip archive, as torch.save writes"
    if start[:1] in (b"{", b"["):
        return "it is JSON; a trace of the profiler is for flopwise explain"
    if start[:1] == b"<":
        return "it is a web page or XML"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file"
    return "it is no pickle"
