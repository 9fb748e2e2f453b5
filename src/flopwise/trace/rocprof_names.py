"""Names in rocprofv3's JSON: of kernels and operations by their numbers, of ROCTx markers by correlation id.

Records have numbers, and the lists that name them may come before or after. What a record is called is kept as a key until the
file was read to its end.
"""

from typing import Any

import msgspec
import numpy as np

from flopwise.trace.columns import GrowingColumn, Ints
from flopwise.trace.kineto_columns import Numbers
from flopwise.trace.tables import MAX_NAMES, MAX_NAMES_CHARACTERS, NO_ID, OTHER_NAMES

_MOST_SYMBOL_CHARACTERS = 64 << 20  # of the kernels of all libraries that were loaded, few of which ran
_MOST_KINDS = 1000
_NO_KERNEL, _NO_CALL = "(unnamed kernel)", "(unnamed call)"


class Symbol(msgspec.Struct, gc=False):
    kernel_id: int = NO_ID
    kernel_name: str = ""
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""

    @property
    def name(self) -> str:
        """As people write it, with template arguments; the formatted name may be cut."""
        return self.demangled_kernel_name or self.formatted_kernel_name or self.kernel_name or _NO_KERNEL


class Kind(msgspec.Struct, gc=False):
    kind: str = ""
    operations: list[str] = []


class Message(msgspec.Struct, gc=False):
    key: int = NO_ID
    value: str = ""


class Names:
    """The names of a file's processes; a name has a number as soon as a record has it."""

    def __init__(self) -> None:
        self.folded = 0
        self._keys: dict[tuple[Any, ...], int] = {}
        self._symbols: dict[tuple[int, int], str] = {}
        self._kinds: dict[int, list[Kind]] = {}
        self._messages: dict[int, tuple[GrowingColumn, GrowingColumn]] = {}  # ids and numbers, by process
        self._sorted: dict[int, tuple[Ints, Ints]] = {}
        self._symbol_characters = self._message_characters = 0

    def add_symbols(self, process: int, symbols: list[Symbol]) -> None:
        for one in symbols:
            name = one.name
            self._symbol_characters += len(name)
            if self._symbol_characters > _MOST_SYMBOL_CHARACTERS:
                return
            self._symbols[process, one.kernel_id] = name

    def add_kinds(self, process: int, kinds: list[msgspec.Raw]) -> None:
        """Each has its place; one that is odd keeps it."""
        known = self._kinds.setdefault(process, [])
        for raw in kinds[: _MOST_KINDS - len(known)]:
            try:
                known.append(msgspec.json.decode(raw, type=Kind))
            except (msgspec.DecodeError, UnicodeDecodeError):
                known.append(Kind())

    def add_messages(self, process: int, messages: list[Message]) -> None:
        ids, numbers = self._messages.setdefault(process, (GrowingColumn(), GrowingColumn()))
        ids.append(integers([one.key for one in messages]))
        numbers.append(np.array([self._message(one.value) for one in messages], np.int64))
        self._sorted.pop(process, None)

    def has_messages(self) -> bool:
        return bool(self._messages)

    def kernel(self, process: int, kernel: int) -> int:
        return self._number(("kernel", process, kernel))

    def operation(self, process: int, kind: int | str, operation: int | str) -> int:
        """The number of a call's or a copy's name."""
        return self._number(("operation", process, kind, operation))

    def messages(self, process: int, ids: Ints) -> Ints:
        """The numbers of the messages of these correlation ids; NO_ID where there is none, or an empty one."""
        if process not in self._sorted:
            known, numbers = (
                column.values() for column in self._messages.get(process, (GrowingColumn(), GrowingColumn()))
            )
            order = np.argsort(known, kind="stable")
            self._sorted[process] = known[order], numbers[order]
        known, numbers = self._sorted[process]
        if not len(known):
            return np.full(len(ids), NO_ID)
        at = np.searchsorted(known, ids, side="right") - 1  # of two under one id the last
        return np.where((at >= 0) & (known[at] == ids), numbers[at], NO_ID)

    def _message(self, text: str) -> int:
        if not text:
            return NO_ID
        if ("message", text) not in self._keys:
            self._message_characters += len(text)
            if self._message_characters > MAX_NAMES_CHARACTERS:
                self.folded += 1
                return self._keys.setdefault((), len(self._keys))
        return self._number(("message", text))

    def _number(self, key: tuple[Any, ...]) -> int:
        if (number := self._keys.get(key)) is not None:
            return number
        if len(self._keys) >= MAX_NAMES:
            self.folded += 1
            key = ()
        return self._keys.setdefault(key, len(self._keys))

    def texts(self) -> tuple[list[str], Ints]:
        """Every name once, and the place of each number's name among them."""
        once = Numbers()
        places = np.array([once[self._text(key)] for key in self._keys], np.int64)
        return list(once), places

    def _text(self, key: tuple[Any, ...]) -> str:
        match key:
            case ("kernel", process, kernel):
                return self._symbols.get((process, kernel), _NO_KERNEL)
            case ("operation", process, kind, operation):
                return self._operation(process, kind, operation) or _NO_CALL
            case ("message", text):
                return str(text)
        return OTHER_NAMES

    def _operation(self, process: int, kind: int | str, operation: int | str) -> str:
        """`hipLaunchKernel`, `MEMORY_COPY_HOST_TO_DEVICE`."""
        if isinstance(operation, str):
            return operation
        kinds = self._kinds.get(process, [])
        if isinstance(kind, str):
            known = next((one for one in kinds if one.kind == kind), None)
        else:
            known = kinds[kind] if 0 <= kind < len(kinds) else None
        return known.operations[operation] if known is not None and 0 <= operation < len(known.operations) else ""


def integers(values: list[int]) -> Ints:
    """A column; a handle may have all 64 bits, and what has more is no number."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([signed(value) for value in values], np.int64)


def signed(value: int) -> int:
    """
    >>> signed(5), signed(2**64 - 2), signed(2**70)
    (5, -2, -1)
    """
    value = value - 2**64 if 2**63 <= value < 2**64 else value
    return value if -(2**63) <= value < 2**63 else NO_ID
