"""Is a pickle nothing but plain containers, numbers and strings? Answered by reading its opcodes, before anything is built.

`pickle` without `find_class` would still let a file choose how much memory is taken: a memo slot of any number allocates all
slots before it, a byte makes a container of a hundred. So the opcodes are walked first, by a regular expression that takes
whole runs of fixed-length opcodes at a time; only strings, frames and long integers come back to Python one by one.
"""

import pickletools
import re

from flopwise.errors import FlopwiseError

HINT = "write snapshots with torch.cuda.memory._dump_snapshot('snapshot.pickle')"

# Opcodes whose length is fixed: memo gets and puts, numbers, containers, marks. NEXT_BUFFER and sets are not among them.
_FIXED = re.compile(
    rb"(?>(?:j.{4})++|(?:h.)++|[\])}(aesu012tldN\x85\x86\x87\x88\x89\x94]++|J.{4}|K.|M..|G.{8}|q.|"
    rb"\x8a(?:\x08.{8}|\x07.{7}|\x06.{6}|\x05.{5}|\x00|\x01.|\x02..|\x03...|\x04.{4}|\x09.{9}))*+",
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


def check(pickled: bytes, name: str) -> None:
    """Refuse a pickle that would do more than build plain containers, or take memory out of all proportion.

    >>> import pickle
    >>> check(pickle.dumps({"segments": [], "device_traces": [[]]}), "snapshot.pickle")
    >>> check(pickle.dumps(print), "evil.pickle")
    Traceback (most recent call last):
    flopwise.errors.FlopwiseError: evil.pickle is refused: it tries to load builtins.print (STACK_GLOBAL)
    """
    end = _walk(pickled, name)
    estimate = _BYTES_PER_BYTE * end + sum(pickled.count(op, 0, end) * cost for op, cost in _BYTES_PER.items())
    if estimate > _MOST_BYTES + _MOST_PER_BYTE * end:
        raise FlopwiseError(f"{name} is refused: unpacked it would take {estimate // end} times its size", HINT)


def _walk(pickled: bytes, name: str) -> int:
    """Opcode by opcode to the end; returns where it is."""
    at, size, strings = 0, len(pickled), ("", "")
    while at < size:
        match = _FIXED.match(pickled, at)
        at = match.end() if match else at
        if at >= size:
            break
        opcode = pickled[at]
        if opcode in _STRINGS:
            start = at + 1 + _STRINGS[opcode]
            at = start + int.from_bytes(pickled[at + 1 : start], "little")
            strings = strings[1], pickled[start : min(at, start + 80)].decode(errors="replace")
        elif opcode == _FRAME:
            at += 9
        elif opcode == _PROTO:
            at += 2
        elif opcode == _LONG_BINPUT:
            if (
                int.from_bytes(pickled[at + 1 : at + 5], "little") > at
            ):  # every memo slot had an object, of a byte at least
                raise FlopwiseError(f"{name} is refused: it asks for a memo slot that nothing was put into", HINT)
            at += 5
        elif opcode == _STOP:
            return at + 1
        elif at + 1 >= size or (opcode == _LONG1 and pickled[at + 1] <= 9):  # cut off inside an opcode of fixed length
            raise truncated(name)
        else:
            raise _refusal(pickled, at, strings, name)
    raise truncated(name)


def truncated(name: str) -> FlopwiseError:
    """The error for a pickle without an end."""
    return FlopwiseError(f"{name} is cut off: the pickle ends before its end", "copy it again, whole")


def _refusal(pickled: bytes, at: int, strings: tuple[str, str], name: str) -> FlopwiseError:
    known = _NAMES.get(pickled[at])
    if known is None:
        return FlopwiseError(f"{name} is damaged: byte {at:,} is no pickle opcode", "copy it again, whole")
    if known in _SHORT:
        return truncated(name)
    if pickled[at] in (_GLOBAL, _INST):
        loaded = b".".join(pickled[at + 1 : at + 201].split(b"\n")[:2]).decode(errors="replace")
    else:
        loaded = ".".join(strings) if pickled[at] == _STACK_GLOBAL else ""
    doing = f"it tries to load {loaded} ({known})" if loaded else f"it holds what no snapshot does ({known})"
    return FlopwiseError(f"{name} is refused: {doing}", HINT)
