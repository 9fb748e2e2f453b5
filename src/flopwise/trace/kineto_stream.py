"""A Kineto (Chrome trace) file as chunks of typed events, in bounded memory, whatever the bytes.

A chunk is cut where the text looks like the seam of two events, and decoded. The cut needs no proof: JSON is read from left to
right, so a chunk that decodes as a whole list was cut at depth one, outside strings. Only when it does not decode (bare NaN, odd
bytes, the end of the list) is the text scanned for its structure, then repaired, then read event by event.
"""

import contextlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, NoReturn, TypeVar, cast

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.records.note import Note
from flopwise.trace.collective_args import CollectiveArgs
from flopwise.trace.input_file import GZIP_MAGIC, SQLITE_MAGIC, Unpacked, check_file, check_inflated
from flopwise.trace.json_text import Structure, repaired

CHUNK_BYTES = 1 << 16  # larger chunks read slower: the decoded events fall out of the CPU's cache
EVENT_BYTES = 16 << 20  # the largest event, header or trailer that is held in memory
MOST_LOOSE = 1_000_000  # events that are read one by one, which takes ten times as long
_MANY_COMMAS = 100_000  # per object: a list of something else
NESTING = 400  # below Python's recursion limit, far above what a profiler writes (4)
INFLATED_BYTES = 64 << 30  # what a gzip file may unpack to

_COPY_AGAIN = "copy the whole file again, or capture again: a profiler that was killed does not finish its file"
_WHAT_IS_READ = "flopwise reads the .json or .json.gz that torch.profiler's export_chrome_trace writes"

_KEPT = ("deviceProperties", "distributedInfo", "baseTimeNanoseconds", "host_name")  # of the keys beside the events

Microseconds = TypeVar("Microseconds")
NO_LIST = msgspec.Raw(b"")


class Args(msgspec.Struct, frozen=True, gc=False):
    """What flopwise uses of an event's args; -1 where absent. In the order of the files, which decodes fastest."""

    device: int = -1
    stream: int = -1
    correlation: int = -1
    bytes: int = -1
    graph_node: int = msgspec.field(default=0, name="graph node id")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    # As written: few are ever looked at.
    values: msgspec.Raw = msgspec.field(default=NO_LIST, name="Concrete Inputs")
    types: msgspec.Raw = msgspec.field(default=NO_LIST, name="Input type")
    strides: msgspec.Raw = msgspec.field(default=NO_LIST, name="Input Strides")
    dims: msgspec.Raw = msgspec.field(default=NO_LIST, name="Input Dims")


NO_ARGS = Args()
INT_ARGS = [
    (field.name, field.encode_name, field.default) for field in msgspec.structs.fields(Args) if field.type is int
]
_INT_KEYS = frozenset(key for _, key, _ in INT_ARGS)
NO_TIME: Any = float("nan")


class Event(msgspec.Struct, Generic[Microseconds], gc=False):
    """One trace event. `ts` is a float, or the number's own text where a float would lose nanoseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Microseconds = NO_TIME
    dur: float = NO_TIME
    args: Args = NO_ARGS


class _LooseEvent(msgspec.Struct):
    """An event whose fields have unexpected types."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    args: Any = None


_RAW_EVENTS = msgspec.json.Decoder(list[msgspec.Raw])
_LOOSE_EVENT = msgspec.json.Decoder(_LooseEvent)


class FileBytes:
    """The file's bytes, unpacked if gzip; every failure is a FlopwiseError, and a gzip bomb is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_file(path, _WHAT_IS_READ)
            self._raw = path.open("rb")
            self.gzipped = self._raw.peek(2)[:2] == GZIP_MAGIC
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            reason = getattr(error, "strerror", None) or error
            raise FlopwiseError(f"cannot open {path}: {reason}", "check that you may read it") from None
        self._file = cast(BinaryIO, Unpacked(path, self._raw)) if self.gzipped else self._raw
        self.total = 0

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except EOFError:
            at = f"byte {self._raw.tell():,} of the compressed file"
            message = f"{self.path} is truncated at {at}: the gzip stream is not finished"
            raise FlopwiseError(message, _COPY_AGAIN) from None
        except (OSError, zlib.error) as error:
            message = f"cannot read {self.path} near byte {self._raw.tell():,}: {error}"
            raise FlopwiseError(message, _COPY_AGAIN) from None
        self.total += len(data)
        if self.gzipped:
            check_inflated(self.path, self._raw.tell(), self.total, INFLATED_BYTES)
        return data

    def close(self) -> None:
        self._file.close()
        self._raw.close()


def beginning(path: Path, size: int) -> bytes:
    """The first bytes of a file, unpacked if gzip."""
    file = FileBytes(path)
    try:
        return file.read(size)
    finally:
        file.close()


class EventStream:
    """Iterate once over the lists of events of a file; then `metadata` holds the other keys and `dropped` what was not usable."""

    def __init__(self, path: Path, exact: bool) -> None:
        self.path = path
        self.metadata: dict[str, bytes] = {}
        self.notes: list[Note] = []
        self.dropped = 0
        self.collectives = CollectiveArgs(exact)
        self._bytes = FileBytes(path)
        self._decoder: msgspec.json.Decoder[list[Event[Any]]]
        self._decoder = msgspec.json.Decoder(list[Event[msgspec.Raw]] if exact else list[Event[float]])
        self._event_decoder: msgspec.json.Decoder[Event[Any]]
        self._event_decoder = msgspec.json.Decoder(Event[msgspec.Raw] if exact else Event[float])
        self._exact = exact
        self._loose = 0

    def __iter__(self) -> Iterator[list[Event[Any]]]:
        try:
            yield from self._chunks()
        except RecursionError:
            self._refuse_nesting()
        finally:
            self._bytes.close()

    def _chunks(self) -> Iterator[list[Event[Any]]]:
        rest, in_object = self._header()
        opening = b"["  # later chunks begin with a comma, after an event that says nothing
        while True:
            data = self._bytes.read(_next_size(rest))
            rest += data
            cut = likely_seam(rest) if data else 0
            try:
                events = self._decode(b"".join((opening, memoryview(rest)[:cut], b"]"))) if cut else None
            except msgspec.DecodeError:
                events = None
            if events is None:
                structure = Structure(rest)
                self._check_nesting(structure)
                end = structure.list_end()
                if end is not None:
                    yield self._decode_or_refuse(opening + rest[:end].rstrip(b" \t\r\n,") + b"]")
                    self._trailer(rest[end + 1 :], in_object)
                    return
                cut = structure.last_event_end()
                events = self._decode_or_refuse(opening + rest[:cut] + b"]") if cut else []
            if cut:
                yield events
                opening, rest = b"[{}", rest[cut:]
            if not data:
                self._refuse_truncated()
            if len(rest) > EVENT_BYTES:
                self._refuse_size("an event")

    def _header(self) -> tuple[bytes, bool]:
        """Read up to the list of events: what follows its bracket, and whether the list is a key of an object."""
        text = b""
        while True:
            data = self._bytes.read(_next_size(text))
            text += data
            start = text.removeprefix(b"\xef\xbb\xbf").lstrip()
            if start[:1] == b"[":
                return start[1:], False
            if start.startswith(SQLITE_MAGIC):
                name = self.path.name.replace(".json", ".sqlite")
                raise FlopwiseError(
                    f"{self.path} is an SQLite file, not JSON", f"from Nsight Systems? rename it {name}"
                )
            if start and start[:1] != b"{":
                message = f"{self.path} is not a PyTorch trace: it does not begin with {{ or ["
                raise FlopwiseError(message, _WHAT_IS_READ)
            at = self._list_start(start)
            if at is not None:
                self._keep_metadata(start[: at[0]].rstrip(b" \t\r\n,") + b"}")
                return start[at[1] :], True
            if not data:
                self._refuse_other(start)
            if len(text) > EVENT_BYTES:
                self._refuse_size("the part before traceEvents")

    def _list_start(self, text: bytes) -> tuple[int, int] | None:
        matches = [match.span() for match in re.finditer(rb'"traceEvents"\s*:\s*\[', text)]
        if not matches:
            return None
        structure = Structure(text[: matches[-1][1]])
        self._check_nesting(structure)
        # Just before its quote a key is outside strings, and in the outermost object.
        keys = (span for span in matches if structure.depth_at(span[0]) == 1 and not structure.in_string[span[0] - 1])
        return next(keys, None)

    def _trailer(self, rest: bytes, in_object: bool) -> None:
        while data := self._bytes.read(CHUNK_BYTES):
            rest += data
            if len(rest) > EVENT_BYTES:
                self._refuse_size("the part after traceEvents")
        if in_object:
            if not rest.rstrip().endswith(b"}"):
                self._refuse_truncated()
            self._keep_metadata(b'{"":0' + rest)
        elif rest.strip():
            raise FlopwiseError(f"{self.path} is not valid JSON: text after the list of events", _WHAT_IS_READ)

    def _keep_metadata(self, text: bytes) -> None:
        """Keep what flopwise uses of the other keys: they may hold the environment of the process, secrets included."""
        try:
            values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError):
            try:
                values = msgspec.json.decode(repaired(text), type=dict[str, msgspec.Raw])
            except msgspec.DecodeError as error:
                self._refuse_json(error)
        self.metadata |= {key: bytes(values[key]) for key in _KEPT if key in values}
        if "traceEvents" in values:
            self.notes.append(Note("second_list", "a second traceEvents list was not read"))

    def _decode(self, text: bytes) -> list[Event[Any]]:
        """A list of whole events, and what it says of collectives."""
        events = self._decoded(text)
        self.collectives.add(text)
        return events

    def _decoded(self, text: bytes) -> list[Event[Any]]:
        """Decode a list of whole events: as it is, else repaired, else event by event."""
        try:
            return self._decoder.decode(text)
        except msgspec.ValidationError:  # JSON, but not the types that are usual
            return self._decode_loosely(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = repaired(text)
        try:
            return self._decoder.decode(text)
        except msgspec.ValidationError:
            return self._decode_loosely(text)

    def _decode_loosely(self, text: bytes) -> list[Event[Any]]:
        if text.count(b",") > _MANY_COMMAS * (1 + text.count(b"{")):
            raise FlopwiseError(f"{self.path} is not a profiler's trace: its list holds no events", _WHAT_IS_READ)
        found = _RAW_EVENTS.decode(text)
        self._loose += len(found)
        if self._loose > MOST_LOOSE:
            message = (
                f"{self.path} is not a PyTorch trace: more than {MOST_LOOSE:,} events are near others of odd types"
            )
            raise FlopwiseError(message, _WHAT_IS_READ)
        loose = [self._loose_event(raw) for raw in found]
        events = [event for event in loose if event is not None]
        self.dropped += len(loose) - len(events)
        return events

    def _loose_event(self, raw: msgspec.Raw) -> Event[Any] | None:
        """An event from fields of any type, or None if it is no event."""
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return self._event_decoder.decode(raw)
        try:
            event = _LOOSE_EVENT.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            try:
                event = _LOOSE_EVENT.decode(repaired(bytes(raw)))
            except msgspec.DecodeError:
                return None
        start = event.ts if self._exact else _number(event.ts)
        given = event.args if isinstance(event.args, dict) else {}
        known = given.keys() & _INT_KEYS
        whole: dict[str, Any] = {name: _whole(given[key], default) for name, key, default in INT_ARGS if key in known}
        pid, tid = (value if isinstance(value, str) else _whole(value, -1) for value in (event.pid, event.tid))
        return Event(str(event.ph), str(event.cat), str(event.name), pid, tid, start, _number(event.dur), Args(**whole))

    def _decode_or_refuse(self, text: bytes) -> list[Event[Any]]:
        try:
            return self._decode(text)
        except msgspec.DecodeError as error:
            self._refuse_json(error)

    def _check_nesting(self, structure: Structure) -> None:
        if len(structure.depth) and structure.depth.max() > NESTING:
            self._refuse_nesting()

    def _refuse_nesting(self) -> NoReturn:
        message = f"{self.path} is not a profiler's trace: nested more than {NESTING} deep"
        raise FlopwiseError(message, _WHAT_IS_READ) from None

    def _refuse_truncated(self) -> NoReturn:
        unpacked = " (unpacked)" if self._bytes.gzipped else ""
        at = f"byte {self._bytes.total:,}{unpacked}"
        raise FlopwiseError(f"{self.path} is truncated at {at}: its list of events is not finished", _COPY_AGAIN)

    def _refuse_size(self, what: str) -> NoReturn:
        limit = f"{EVENT_BYTES >> 20} MiB, before byte {self._bytes.total:,}"
        hint = "a profiler's events are a few hundred bytes: the file is damaged, or it is another format"
        raise FlopwiseError(f"{what} in {self.path} is larger than {limit}: refused", hint)

    def _refuse_json(self, error: Exception) -> NoReturn:
        at = f"the last part read, before byte {self._bytes.total:,}"
        raise FlopwiseError(f"{self.path} is not valid JSON in {at}: {error}", _COPY_AGAIN) from None

    def _refuse_other(self, text: bytes) -> NoReturn:
        """The file ended and held no list of events."""
        if not text:
            raise FlopwiseError(f"{self.path} is empty", _WHAT_IS_READ)
        try:
            msgspec.json.decode(text, type=msgspec.Raw)
        except msgspec.DecodeError:
            self._refuse_truncated()
        raise FlopwiseError(f"{self.path} is JSON but not a trace: it has no list named traceEvents", _WHAT_IS_READ)


def _next_size(held: bytes) -> int:
    """Double what is held while an event does not end, so that a giant is scanned a few times and not once per chunk."""
    return max(CHUNK_BYTES, min(len(held), 4 << 20))


def likely_seam(text: bytes) -> int:
    """Just past the last event that another seems to follow; 0 if the text does not look so."""
    at = len(text)
    for _ in range(16):  # an object among an event's args also ends in '},', but is followed by a key
        at = text.rfind(b"},", 0, at)
        if at < 0:
            return 0
        if text[at + 2 : at + 34].lstrip()[:1] == b"{":
            return at + 1
    return 0


def _number(text: msgspec.Raw) -> float:
    try:
        return float(bytes(text).strip(b'"'))
    except ValueError:
        return float("nan")


def _whole(value: object, default: int) -> int:
    """Read a whole number that fits a column from a number or its text."""
    try:
        number = int(cast(Any, value))
    except (ValueError, TypeError, OverflowError):
        return default
    return number if abs(number) < 1 << 62 else default
