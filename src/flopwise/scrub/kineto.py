"""A copy of a PyTorch trace with nothing in it but what an analysis needs.

Events are copied one chunk at a time; of each only listed fields, of its args only listed keys. Times keep their own digits.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from flopwise.redact import redacted, redacted_code, redacted_frame
from flopwise.scrub.words import ARG_WORDS, ARGS, CATEGORIES, PLACES, POINT_NAMES, TOP_LEVEL, TYPES
from flopwise.trace.json_text import repaired
from flopwise.trace.kineto_stream import EventStream

_ABSENT = msgspec.Raw(b"")

_METADATA = {  # events that name processes and threads: the key they may keep, and its pattern
    "process_name": ("name", re.compile(r"(?!)")),
    "process_labels": ("labels", re.compile(r"(?:CPU|GPU \d{1,4})")),
    "process_sort_index": ("sort_index", None),
    "thread_name": ("name", re.compile(r"(?:stream|thread) \d{1,20}")),
    "thread_sort_index": ("sort_index", None),
}
_NUMBER = re.compile(rb'"?-?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,4})?"?')
_NUMBERS = re.compile(r"[\d\s\[\],.eE+-]*|True|False|None")
_BLOCK_SIZES = re.compile(r"[A-Z0-9_]{1,20}=\d{1,9}(?:,[A-Z0-9_]{1,20}=\d{1,9}){0,20}")
_WHOLE = re.compile(r"-?\d{1,20}")
_LASTING = ("X", "B", "E")
_FIRST_PLACE = 1 << 40  # above every process's and thread's number
_GPU_NAME, _GPU_KEY = re.compile(r"[\w .()/-]{1,80}"), re.compile(r"(?!(?i:.*uuid))[A-Za-z]{1,40}")


class _Event(msgspec.Struct, omit_defaults=True):
    """The fields an event may keep; numbers that carry time as their own text."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    id: Any = None
    bp: Any = None
    s: Any = None
    args: Any = None


class _FullEvents(EventStream):
    """The reader's stream, with every field of an event and every top-level key that may be kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, exact=True)
        self._full = msgspec.json.Decoder(list[_Event])

    def _try_decode(self, text: bytes) -> list[Any] | None:
        try:
            return self._full.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _decode(self, text: bytes) -> list[Any]:
        events = self._try_decode(text)
        events = self._try_decode(repaired(text)) if events is None else events
        if events is None:
            try:
                raws = msgspec.json.decode(repaired(text), type=list[msgspec.Raw])
            except msgspec.DecodeError as error:
                self._refuse_json(error)
            events = [event for raw in raws for event in self._try_decode(b"[" + bytes(raw) + b"]") or ()]
        return events

    def _keep_metadata(self, text: bytes) -> None:
        try:
            values = msgspec.json.decode(repaired(text), type=dict[str, Any])
        except msgspec.DecodeError as error:
            self._refuse_json(error)
        kept = {key: _numbers(value) for key, value in values.items() if key in TOP_LEVEL}
        if isinstance(values.get("displayTimeUnit"), str):
            kept["displayTimeUnit"] = "ns" if values["displayTimeUnit"] == "ns" else "ms"
        if isinstance(devices := values.get("deviceProperties"), list):
            kept["deviceProperties"] = [_device(d) for d in devices if isinstance(d, dict)]
        if isinstance(job := values.get("distributedInfo"), dict):
            kept["distributedInfo"] = {k: _numbers(job.get(k)) for k in ("rank", "world_size") if k in job}
        self.metadata.update((key, msgspec.json.encode(value)) for key, value in kept.items())


def scrub_kineto(source: Path, out: BinaryIO) -> None:
    """Write the copy of `source` to `out`, uncompressed."""
    stream = _FullEvents(source)
    encoder = msgspec.json.Encoder()
    places = _Places()
    chunks: Iterator[list[Any]] = iter(stream)
    first = next(chunks, [])
    written = set(stream.metadata)
    out.write(b"{" + b"".join(b'"%b":%b,\n' % (key.encode(), value) for key, value in stream.metadata.items()))
    out.write(b'"traceEvents":[\n')
    comma = b""
    for events in itertools.chain([first], chunks):
        for event in filter(None, (_safe(event, places) for event in events)):
            out.write(comma + encoder.encode(event))
            comma = b",\n"
    later = {key: value for key, value in stream.metadata.items() if key not in written}
    out.write(b"\n]" + b"".join(b',\n"%b":%b' % (key.encode(), value) for key, value in later.items()) + b"}\n")


class _Places(dict[str, int]):
    """A number for each process, thread or flow that has a name: events that were in one place stay together."""

    def __missing__(self, name: str) -> int:
        self[name] = number = _FIRST_PLACE + len(self)
        return number

    def of(self, value: object) -> object:
        if isinstance(value, str):
            return value if value in PLACES or _WHOLE.fullmatch(value) else self[value]
        return value if isinstance(value, int) else None


def _safe(event: _Event, places: _Places) -> _Event | None:
    """What may be kept of an event; None for one that cannot be understood, or only identifies the machine."""
    if not (isinstance(event.ph, str) and len(event.ph) == 1):
        return None
    args = _metadata_args(event) if event.ph == "M" else _args(event.args)
    if args is None:
        return None
    return _Event(
        ph=event.ph,
        cat=_known(event.cat, CATEGORIES),
        name=_name(event),
        pid=places.of(event.pid),
        tid=places.of(event.tid),
        ts=event.ts if _NUMBER.fullmatch(bytes(event.ts)) else _ABSENT,
        dur=event.dur if _NUMBER.fullmatch(bytes(event.dur)) else _ABSENT,
        id=places.of(event.id),
        bp="e" if event.bp == "e" else None,
        s=event.s if event.s in ("t", "p", "g") else None,
        args=args or None,
    )


def _known(value: object, words: frozenset[str]) -> str | None:
    return value if isinstance(value, str) and value in words else None


def _name(event: _Event) -> str | None:
    """Readers need the names of what lasts, in the categories they know; of all else only names that are the profiler's own."""
    if event.ph == "M":
        return _known(event.name, frozenset(_METADATA))
    if event.ph not in _LASTING or not isinstance(event.name, str):
        return _known(event.name, POINT_NAMES)
    if event.ph != "E" and _known(event.cat, CATEGORIES) is None:  # an end need not say what it ends
        return None
    rule = {"python_function": redacted_frame, "kernel": redacted_code}.get(str(event.cat), redacted)
    return rule(event.name)


def _args(given: object) -> dict[str, object]:
    if not isinstance(given, dict):
        return {}
    kept = {key: _numbers(value, types=key == "Input type") for key, value in given.items() if key in ARGS}
    words = {key: word for key, known in ARG_WORDS.items() if (word := _known(given.get(key), known)) is not None}
    if isinstance(kernel := given.get("kernel_name"), str):
        words["kernel_name"] = redacted_code(kernel)
    if isinstance(sizes := given.get("kernel_kwargs"), str) and _BLOCK_SIZES.fullmatch(sizes):
        words["kernel_kwargs"] = sizes
    if isinstance(dtype := given.get("dtype"), str) and TYPES.fullmatch(dtype):
        words["dtype"] = dtype
    return kept | words


def _metadata_args(event: _Event) -> dict[str, object] | None:
    key, allowed = _METADATA.get(str(event.name), ("", None))
    if not key or not isinstance(event.args, dict):
        return None
    value = event.args.get(key)
    if allowed is None:
        return {key: _numbers(value)}
    match = allowed.match(value) if isinstance(value, str) else None
    return {key: match[0] if match else ""}


def _numbers(value: object, types: bool = False) -> object:
    """Numbers, texts of numbers, and lists of them; names of types where those are expected; else ''."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        return [_numbers(item, types) for item in value]
    known = isinstance(value, str) and (_NUMBERS.fullmatch(value) or (types and TYPES.fullmatch(value)))
    return value if known else ""


def _device(properties: dict[str, Any]) -> dict[str, object]:
    """A GPU: its name, and numbers."""
    numbers = {key: value for key, value in properties.items() if isinstance(value, int | float)}
    kept = {key: value for key, value in numbers.items() if _GPU_KEY.fullmatch(key)}
    name = properties.get("name")
    return kept | ({"name": name} if isinstance(name, str) and _GPU_NAME.fullmatch(name) else {})
