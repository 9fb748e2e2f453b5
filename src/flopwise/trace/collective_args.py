"""What PyTorch writes about a collective: its process group, its place in the group's order, its size.

Since 2.3 kernels carry it ("Collective name", "Process Group Name", "In msg nelems", later "Seq"); before, and for Gloo, the
ranges `nccl:all_reduce` and `gloo:all_reduce` carry the sizes of the tensors. Few chunks of a file hold any: only those are
decoded again.
"""

import math
import re
from typing import Any, Generic, TypeVar

import msgspec
import polars as pl

from flopwise.spec.dtypes import ITEM_BYTES, from_kineto
from flopwise.trace.columns import MOST_BYTES
from flopwise.trace.tables import COLLECTIVE_ARGS, NO_ID

KERNEL, RANGE = "kernel", "range"
_MARKS = (b'"Collective name"', b'"nccl:', b'"gloo:', b'"mpi:', b'"ucc:')
_RANGE = re.compile(r"(?:nccl|gloo|mpi|ucc):\w")
_KERNELS = ("kernel", "Kernel")
_LONGEST = 4096  # letters of a group's list of ranks
_LARGEST = 1 << 62
MOST_COLLECTIVES, MOST_CHARACTERS = 500_000, 16_000_000  # that are kept of a trace
# How PyTorch names a tensor's type here, and what it is called elsewhere.
_DTYPES = {
    "Double": "fp64",
    "Float": "fp32",
    "Half": "fp16",
    "BFloat16": "bf16",
    "Float8_e4m3fn": "fp8",
    "Float8_e5m2": "fp8_e5m2",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
Microseconds = TypeVar("Microseconds")


class _Args(msgspec.Struct, gc=False):
    correlation: Any = NO_ID
    collective: Any = msgspec.field(default="", name="Collective name")
    group: Any = msgspec.field(default="", name="Process Group Name")
    description: Any = msgspec.field(default="", name="Process Group Description")
    ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    size: Any = msgspec.field(default=0, name="Group size")
    sequence: Any = msgspec.field(default=NO_ID, name="Seq")
    sent: Any = msgspec.field(default=0, name="In msg nelems")
    received: Any = msgspec.field(default=0, name="Out msg nelems")
    dtype: Any = ""
    source: Any = msgspec.field(default=NO_ID, name="Src Rank")
    target: Any = msgspec.field(default=NO_ID, name="Dst Rank")
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")


class _Event(msgspec.Struct, Generic[Microseconds], gc=False):
    cat: Any = ""
    name: Any = ""
    pid: Any = NO_ID
    tid: Any = NO_ID
    ts: Microseconds = msgspec.field(default=float("nan"))  # type: ignore[assignment]
    args: _Args = msgspec.field(default_factory=_Args)


class _Told(msgspec.Struct, gc=False):
    """What is kept of an event: its time as written, and its row."""

    ts: Any
    row: tuple[Any, ...]


class CollectiveArgs:
    """Grows with the chunks of a file, up to a limit; the times are kept as written until those of all events are known."""

    def __init__(self, exact: bool) -> None:
        self.events: list[_Told] = []
        self.left_out = 0
        self._texts: dict[str, str] = {}  # each once
        self._left = MOST_CHARACTERS
        self._decoder: msgspec.json.Decoder[list[_Event[Any]]]
        self._decoder = msgspec.json.Decoder(list[_Event[msgspec.Raw]] if exact else list[_Event[float]])

    def add(self, text: bytes) -> None:
        """Keep what a chunk says of collectives; one whose events are odd says nothing."""
        if not any(mark in text for mark in _MARKS):
            return
        try:
            events = self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        told = [event for event in events if _tells(event)]
        some = told[: max(0, MOST_COLLECTIVES - len(self.events))]
        self.left_out += len(told) - len(some)
        self.events += [_Told(event.ts, tuple(map(self._once, _row(event)))) for event in some]

    def _once(self, value: Any) -> Any:
        """The same text is held once; '' beyond the limit."""
        if not isinstance(value, str):
            return value
        if value not in self._texts:
            if self._left < len(value):
                return ""
            self._left -= len(value)
            self._texts[value] = value
        return self._texts[value]

    def table(self, starts_ns: Any) -> pl.DataFrame:
        """COLLECTIVE_ARGS, of events that begin at these times."""
        rows = [event.row for event in self.events]
        columns = list(zip(*rows, strict=True)) if rows else [()] * (len(COLLECTIVE_ARGS) - 1)
        data = {"start_ns": pl.Series(starts_ns, dtype=pl.Int64)}
        names = [name for name in COLLECTIVE_ARGS if name != "start_ns"]
        data |= {
            name: pl.Series(values, dtype=COLLECTIVE_ARGS[name]) for name, values in zip(names, columns, strict=True)
        }
        return pl.DataFrame(data)


def _tells(event: _Event[Any]) -> bool:
    if event.cat in _KERNELS:
        return bool(event.args.collective)
    return event.cat == "user_annotation" and isinstance(event.name, str) and bool(_RANGE.match(event.name))


def _row(event: _Event[Any]) -> tuple[Any, ...]:
    """In the order of COLLECTIVE_ARGS, without the time."""
    args, on_gpu = event.args, event.cat in _KERNELS
    sent, received = (_whole(one, 0) for one in (args.sent, args.received))
    item = ITEM_BYTES.get(_DTYPES.get(_text(args.dtype), ""), 0)
    n_bytes = max(sent, received) * item if args.collective else _tensor_bytes(args.dims, args.types)
    return (
        KERNEL if on_gpu else RANGE,
        _whole(event.tid, NO_ID),
        _whole(args.correlation, NO_ID),
        _text(args.collective or event.name),
        _text(args.group),
        _text(args.description),
        _text(args.ranks),
        _whole(args.size, 0),
        _whole(args.sequence, NO_ID),
        n_bytes if 0 < n_bytes <= MOST_BYTES else NO_ID,
        _whole(args.source, NO_ID),
        _whole(args.target, NO_ID),
    )


def _text(value: object) -> str:
    return str(value)[:_LONGEST] if isinstance(value, str | int | list) else ""


def _whole(value: object, default: int) -> int:
    """A number, or the text of one.

    >>> _whole("12", -1), _whole(None, -1), _whole(2**70, -1)
    (12, -1, -1)
    """
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value, re.ASCII):
        value = int(value)
    return value if isinstance(value, int) and abs(value) < _LARGEST else default


def _tensor_bytes(dims: object, types: object) -> int:
    """Of the tensors that a range was given.

    >>> _tensor_bytes([[394241]], ["float"]), _tensor_bytes(None, None)
    (1576964, 0)
    """
    if not isinstance(dims, list) or not isinstance(types, list):
        return 0
    total = 0
    for shape, name in zip(dims, types, strict=False):
        dtype = from_kineto(name) if isinstance(name, str) else None
        if dtype is not None and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
            total += math.prod(shape) * dtype.n_bytes
    return max(0, total)


def ranks_of(text: str) -> tuple[int, ...] | None:
    """The ranks of a group as PyTorch writes them; None where the list was cut short, or is none.

    >>> ranks_of("[0, 1]"), ranks_of("[0, 8, ..., 120]"), ranks_of("")
    ((0, 1), None, None)
    """
    if not re.fullmatch(r"\[\s*\d{1,9}(?:\s*,\s*\d{1,9})*\s*\]", text, re.ASCII):
        return None
    return tuple(int(one) for one in text.strip("[] ").split(","))
