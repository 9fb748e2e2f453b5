"""Pickles from outside, read without running any of them.

Two checks: the opcodes are walked first, and only those that build dicts, lists, tuples, numbers, strings, bools and None are
admitted; and the unpickler behind it loads no global and no persistent object, whatever reaches it.

`pickle` without `find_class` would still let a file choose how much memory is taken: a memo slot of any number allocates all
slots before it, a byte makes a container of a hundred. The walk uses a regular expression that takes whole runs of
fixed-length opcodes at a time; only strings, frames and long integers come back to Python one by one.
"""

import gzip
import io
import os
import pickle
import pickletools
import re
import zlib
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flopwise import units
from flopwise.collector import no_collector
from flopwise.errors import FlopwiseError
from flopwise.trace.input_file import GZIP_MAGIC, Unpacked, check_inflated

MOST_BYTES, MOST_UNPACKED_BYTES = 2 * 2**30, 2**29  # of a pickle; of one that is gzipped
_LONGEST_STRING = 16 * 2**20
# An event is a dict, and takes 0.6 to 1.1 kB until it is in a column. With stacks it is some 250 bytes of the pickle.
_MOST_DICTS, _BYTES_PER_DICT = 800_000, 125
_CHUNK = 2**20
_ZIP = b"PK\x03\x04"
_FEWER = "record fewer events: torch.cuda.memory._record_memory_history(max_entries=200000)"
HINT = "write snapshots with torch.cuda.memory._dump_snapshot('snapshot.pickle')"

# Opcodes of fixed length: memo gets and puts, numbers, containers, marks. NEXT_BUFFER and sets are not among them.
_FIXED = re.compile(
    rb"(?>(?:j.{4})++|(?:h.)++|[\])}(aesu012tldN\x85\x86\x87\x88\x89\x94]++|J.{4}|K.|M..|G.{8}|q.|"
    rb"\x8a(?:\x08.{8}|\x07.{7}|\x06.{6}|\x05.{5}|\x00|\x01.|\x02..|\x03...|\x04.{4}|\x09.{9}))*+",
    re.DOTALL,
)
# Some of those that hold no number, then one that does, or the end.
_NUMBER = re.compile(
    rb"(?>(?:(?:j.{4})++|(?:h.)++|[\])}(aesu012tldN\x85\x86\x87\x88\x89\x94]++|q.)*+)"
    rb"(?:J.{4}|K.|M..|G.{8}|\x8a(?:\x08.{8}|\x07.{7}|\x06.{6}|\x05.{5}|\x00|\x01.|\x02..|\x03...|\x04.{4}|\x09.{9})|\Z)",
    re.DOTALL,
)
_STRINGS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8: bytes of their length
_PROTO, _FRAME, _LONG1, _LONG_BINPUT, _STOP = 0x80, 0x95, 0x8A, 0x72, 0x2E
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_SHORT = ("LONG_BINGET", "BINGET", "BININT", "BININT1", "BININT2", "BINFLOAT", "BINPUT")  # refused only where cut off
_GLOBAL, _INST, _STACK_GLOBAL = 0x63, 0x69, 0x93

# What CPython takes for one container, measured with sys.getsizeof and rounded up: an empty one and its first entry.
_BYTES_PER = {b"}": 256, b"]": 120, b"\x85": 72, b"\x86": 72, b"\x87": 80, b"t": 72}
_BYTES_PER_BYTE = 16  # everything else: the largest is a two-letter string, 56 bytes for 4
# A snapshot without stacks comes to 24 times its size by this estimate, one with stacks to 18, a bomb of empty dicts to 272.
_MOST_PER_BYTE, _MOST_BYTES = 40, 256 * 2**20
# Of a number with its place in a list; four times that of a text, as each is walked by itself. An event has five numbers, and
# shares its texts with others.
_NUMBER_BYTES, _TEXT_BYTES, _MOST_VALUE_BYTES = 40, 160, 500 * 10**6


class _PlainUnpickler(pickle.Unpickler):
    """Loads nothing by name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it tries to load {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it tries to load a persistent object")


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
        old = f"{name} is refused: an old pickle protocol (0 or 1), which no snapshot is written in"
        raise FlopwiseError(old, HINT)
    if not pickled or pickled[0] != _PROTO:
        raise FlopwiseError(f"{name} is not a memory snapshot: {_kind(pickled)}", HINT)
    check(pickled, name)
    try:
        # Buffered, because only a stream that can peek is read in blocks where the pickle has no frames.
        with no_collector():
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(pickled), _CHUNK)).load()
    except EOFError:
        raise _truncated(name) from None
    except MemoryError:
        raise FlopwiseError(f"{name} does not fit into this machine's memory", "record fewer events") from None
    except (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise FlopwiseError(f"{name} is damaged or not a snapshot: {error}", HINT) from None


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        if path.is_fifo():
            raise FlopwiseError(f"cannot read {path}: it is a pipe, not a file", "write it to a file first")
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            if head == GZIP_MAGIC:
                return _inflated(path, file, min(most_bytes, MOST_UNPACKED_BYTES))
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                raise FlopwiseError(f"{path.name} is larger than {units.size(most_bytes)}", _FEWER)
            return file.read(size)  # a device has none
    except EOFError:
        raise _truncated(path.name) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FlopwiseError(f"{path.name} is damaged: {error}", "copy it again, whole") from None
    except FileNotFoundError:
        raise FlopwiseError(f"there is no file {path}", HINT) from None
    except OSError as error:
        raise FlopwiseError(
            f"cannot read {path}: {error.strerror or error}", "check that it is a file you may read"
        ) from None


def _inflated(path: Path, file: BinaryIO, most_bytes: int) -> bytes:
    content = io.BytesIO()
    with Unpacked(path, file) as stream:
        while part := stream.read(_CHUNK):
            content.write(part)
            check_inflated(Path(path.name), file.tell(), content.tell(), most_bytes)
    return content.getvalue()


def _is_old(content: bytes) -> bool:
    """Whether it begins and ends as pickles of protocol 0 and 1 do, which have no mark of their own: `(dp0 … .`, `}q\x00 … .`."""
    begins = re.match(rb"\((?:[dl]p\d+\n|i|c)|[}\])]q.|c\w[\w.]*\n", content, re.DOTALL)
    return begins is not None and content.rstrip().endswith(b".")


def _kind(content: bytes) -> str:
    """The kind of a file that is not a pickle, by its first bytes."""
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


def check(pickled: bytes, name: str) -> None:
    """Refuse a pickle that would do more than build plain containers, or take memory out of all proportion.

    >>> import pickle
    >>> check(pickle.dumps({"segments": [], "device_traces": [[]]}), "snapshot.pickle")
    >>> check(pickle.dumps(print), "evil.pickle")
    Traceback (most recent call last):
    flopwise.errors.FlopwiseError: evil.pickle is refused: it tries to load builtins.print (STACK_GLOBAL)
    hint: write snapshots with torch.cuda.memory._dump_snapshot('snapshot.pickle')
    """
    end = _walk(pickled, name)
    estimate = _BYTES_PER_BYTE * end + sum(pickled.count(op, 0, end) * cost for op, cost in _BYTES_PER.items())
    if estimate > _MOST_BYTES + _MOST_PER_BYTE * end:
        raise FlopwiseError(f"{name} is refused: unpacked it would take {estimate // end} times its size", HINT)
    if pickled.count(b"}", 0, end) > max(_MOST_DICTS, end // _BYTES_PER_DICT):
        raise FlopwiseError(f"{name} is refused: it holds more than {_MOST_DICTS:,} events", _FEWER)


# complexity: one case for each kind of opcode
def _walk(pickled: bytes, name: str) -> int:
    """Opcode by opcode to the end; returns where it is."""
    at, size, strings, values = 0, len(pickled), ("", ""), 0
    while at < size:
        match = _FIXED.match(pickled, at)
        end = match.end() if match else at
        values += _number_bytes(pickled, at, end)
        at = end
        if at >= size or values > _MOST_VALUE_BYTES:
            break
        opcode = pickled[at]
        if opcode in _STRINGS:
            start = at + 1 + _STRINGS[opcode]
            length = int.from_bytes(pickled[at + 1 : start], "little")
            at = start + length
            if _LONGEST_STRING < length <= size - start:
                raise FlopwiseError(f"{name} is refused: it holds a text of {units.size(length)}", HINT)
            values += _TEXT_BYTES
            strings = strings[1], pickled[start : min(at, start + 80)].decode(errors="replace")
        elif opcode == _FRAME:
            at += 9
        elif opcode == _PROTO:
            at += 2
        elif opcode == _LONG_BINPUT:
            slot = int.from_bytes(pickled[at + 1 : at + 5], "little")
            if slot > at:  # every memo slot had an object, of a byte at least
                raise FlopwiseError(f"{name} is refused: it asks for a memo slot that nothing was put into", HINT)
            at += 5
        elif opcode == _STOP:
            return at + 1
        elif at + 1 >= size or (opcode == _LONG1 and pickled[at + 1] <= 9):  # cut off inside an opcode of fixed length
            raise _truncated(name)
        else:
            raise _refusal(pickled, at, strings, name)
    if values > _MOST_VALUE_BYTES:
        raise FlopwiseError(f"{name} is refused: it holds more numbers and texts than any snapshot", _FEWER)
    raise _truncated(name)


def _number_bytes(pickled: bytes, at: int, end: int) -> int:
    """What the numbers in a run of opcodes take; of too many as much as is too much."""
    found = islice(_NUMBER.finditer(pickled, at, end), _MOST_VALUE_BYTES // _NUMBER_BYTES + 1) if end > at else ()
    return _NUMBER_BYTES * sum(1 for _ in found)


def _truncated(name: str) -> FlopwiseError:
    """The error for a pickle without an end."""
    return FlopwiseError(f"{name} is cut off: the pickle ends before its end", "copy it again, whole")


def _refusal(pickled: bytes, at: int, strings: tuple[str, str], name: str) -> FlopwiseError:
    known = _NAMES.get(pickled[at])
    if known is None:
        return FlopwiseError(f"{name} is damaged: byte {at:,} is no pickle opcode", "copy it again, whole")
    if known in _SHORT:
        return _truncated(name)
    if pickled[at] in (_GLOBAL, _INST):
        loaded = b".".join(pickled[at + 1 : at + 201].split(b"\n")[:2]).decode(errors="replace")
    else:
        loaded = ".".join(strings) if pickled[at] == _STACK_GLOBAL else ""
    doing = f"it tries to load {loaded} ({known})" if loaded else f"it holds what no snapshot does ({known})"
    return FlopwiseError(f"{name} is refused: {doing}", HINT)
