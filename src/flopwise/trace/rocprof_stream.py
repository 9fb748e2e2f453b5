"""rocprofv3's JSON in bounded memory: its long lists piece by piece, and all that is beside them at once.

The lists of a process (records of each kind, names of kernels, messages of markers) are handed over some hundred objects at a
time, and are empty in `frame`: what is left of the file, which is small.
"""

import contextlib
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from flopwise.errors import FlopwiseError, one_line
from flopwise.trace.json_text import Structure, repaired
from flopwise.trace.kineto_stream import EVENT_BYTES, NESTING, FileBytes, likely_seam

CHUNK_BYTES, MOST_CHUNK_BYTES = 1 << 18, 4 << 20
MOST_LISTS = 2000  # a process has some twenty
_MANY, _SHORTEST = 1_000_000, 30  # objects of a list, and the bytes that so many have on average: real ones a hundred
_AGAIN = "copy the whole file again, or record again: a profiler that was killed does not finish its file"
# A key and the bracket that it names, a string, a bracket, or the quote of a string that is not whole yet.
_TOKEN = re.compile(rb'"((?:[^"\\]++|\\.)*+)"\s*+:\s*+([\[{])|"(?:[^"\\]++|\\.)*+"|[\[\]{}]|"', re.DOTALL)
_GROUPS = (b"buffer_records", b"callback_records", b"strings")  # objects that hold lists
_ALONE = (b"kernel_symbols", b"code_objects", b"counters", b"host_functions")  # lists of the process itself
_SPACE = b" \t\r\n"
_ANY = msgspec.json.Decoder(list[msgspec.Raw])


class Part(NamedTuple):
    """Some objects of a list; None where they are not as rocprofv3 writes them."""

    process: int  # by its place in the file
    group: str  # the object that the list is in; '': the process
    kind: str  # the list's key
    objects: list[Any] | None


class ListStream:
    """Iterate once over the parts of a file's lists; then `frame` is the file without them."""

    def __init__(self, path: Path, decoders: Mapping[tuple[str, str], msgspec.json.Decoder[Any]]) -> None:
        self.path = path
        self.frame = b""
        self._decoders = decoders
        self._kept = bytearray()
        self._open: list[bytes] = []  # the keys of the brackets that are
        self._level = 3  # of the brackets of a process
        self._process = -1
        self._lists = 0
        self._file = FileBytes(path)

    def __iter__(self) -> Iterator[Part]:
        rest = b""
        try:
            while data := self._file.read(_chunk_bytes(rest)):
                rest += data
                while (begin := self._list_begin(rest)) is not None:
                    rest = yield from self._parts(rest[begin:])
                rest = rest[self._passed :]
                if len(self._kept) + len(rest) > EVENT_BYTES:
                    raise self._refusal(f"what is beside its lists is larger than {EVENT_BYTES >> 20} MiB")
        except RecursionError:
            raise self._refusal(f"nested more than {NESTING} deep") from None
        finally:
            self._file.close()
        self.frame = bytes(self._kept) + rest

    def _list_begin(self, text: bytes) -> int | None:
        """Where the next list that is handed over begins; what is before it, or all that is whole, goes to the frame."""
        passed = 0
        for token in _TOKEN.finditer(text):
            key, bracket = token[1], token[2] or token[0]
            is_string = bracket[:1] == b'"'
            if is_string and (bracket == b'"' or not text[token.end() :].strip(_SPACE + b":")):
                break  # not whole, or its bracket may follow
            passed = token.end()
            if bracket in (b"[", b"{") and self._opens_list(key or b"", bracket):
                self._kept += text[:passed]
                return passed
            if bracket in (b"]", b"}"):
                self._open[-1:] = []
        else:
            passed = len(text)
        self._kept += text[:passed]
        self._passed = passed
        return None

    def _opens_list(self, key: bytes, bracket: bytes) -> bool:
        """Take note of a bracket that opens; whether it is a list that is handed over."""
        self._open.append(key)
        depth = len(self._open)
        if depth > NESTING:
            raise RecursionError
        if depth == 2:
            self._level = 3 if bracket == b"[" else 2
        if bracket == b"{":
            self._process += depth == self._level
            return False
        if depth == self._level + 1:
            return key in _ALONE
        return depth == self._level + 2 and self._open[-2] in _GROUPS

    def _parts(self, rest: bytes) -> Generator[Part, None, bytes]:
        """The objects of a list, from behind its bracket; returns the text from the bracket that closes it on."""
        self._lists += 1
        if self._lists > MOST_LISTS:
            raise self._refusal(f"it has more than {MOST_LISTS:,} lists")
        group = self._open[-2].decode(errors="replace") if len(self._open) == self._level + 2 else ""
        kind = self._open[-1].decode(errors="replace")
        decoder = self._decoders.get((group, kind), _ANY)
        objects = n_bytes = 0
        again = False  # objects came before: a comma follows
        while True:
            cut, whole, found = self._next(decoder, rest, again)
            if cut:
                yield Part(self._process, group, kind, found)
                objects, n_bytes = objects + rest.count(b"{", 0, cut), n_bytes + cut
                _refuse_silence(kind, objects, n_bytes)
            if whole:
                return rest[cut:]
            rest, again = rest[cut:], again or cut > 0
            data = self._file.read(_chunk_bytes(rest))
            if not data and not cut:
                raise self._refusal(f"it is cut off at byte {self._file.total:,}, in a list")
            rest += data
            if len(rest) > EVENT_BYTES:
                raise self._refusal(f"an object of {one_line(kind, 40)} is larger than {EVENT_BYTES >> 20} MiB")

    def _next(self, decoder: msgspec.json.Decoder[Any], text: bytes, again: bool) -> tuple[int, bool, list[Any] | None]:
        """Up to where objects are whole, whether the list ends there, and the objects."""
        if cut := likely_seam(text):
            with contextlib.suppress(msgspec.DecodeError):
                return cut, False, self._decoded(decoder, text[:cut], again)
        cut, whole = self._scanned(text)
        try:
            return cut, whole, self._decoded(decoder, text[:cut], again) if cut else None
        except msgspec.DecodeError as error:
            raise self._refusal(one_line(str(error))) from None

    def _scanned(self, text: bytes) -> tuple[int, bool]:
        """Up to where the objects are whole, and whether the list ends there."""
        structure = Structure(text)
        if len(structure.depth) and structure.depth.max() > NESTING:
            raise RecursionError
        end = structure.list_end()
        return (structure.last_event_end(), False) if end is None else (end, True)

    def _decoded(self, decoder: msgspec.json.Decoder[Any], text: bytes, again: bool) -> list[Any] | None:
        text = text.strip(_SPACE)
        if again and text:
            if text[:1] != b",":
                raise msgspec.DecodeError("objects of a list without a comma between them")
            text = text[1:]
        text = b"[" + text + b"]"
        try:
            try:
                return list(decoder.decode(text))
            except UnicodeDecodeError:
                text = repaired(text)
                return list(decoder.decode(text))
        except msgspec.ValidationError:  # JSON as far as it was read, but not of these types
            _ANY.decode(text)
            return None

    def _refusal(self, why: str) -> FlopwiseError:
        return FlopwiseError(f"{self.path} is not rocprofv3's JSON: {why}", _AGAIN)


def _refuse_silence(kind: str, objects: int, n_bytes: int) -> None:
    if objects > _MANY and n_bytes < _SHORTEST * objects:
        problem = f"{objects:,} records of {one_line(kind, 40)} say next to nothing: refused"
        raise FlopwiseError(problem, "the file is damaged")


def _chunk_bytes(held: bytes) -> int:
    """Double what is held while an object does not end."""
    return max(CHUNK_BYTES, min(len(held), MOST_CHUNK_BYTES))


def decoded_frame(stream: ListStream, form: Any) -> Any:
    """What is beside the lists of a file that was read to its end."""
    try:
        try:
            return msgspec.json.decode(stream.frame, type=form)
        except UnicodeDecodeError:
            return msgspec.json.decode(repaired(stream.frame), type=form)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FlopwiseError(f"{stream.path} is not rocprofv3's JSON: {one_line(str(error))}", _AGAIN) from None
