"""Files next to a memory snapshot: what the workload's process knew of each allocation, and predictions. No torch here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.records.prediction import SHAPES, MemoryPrediction

SCHEMA = 1
BEFORE = -1  # the event of what was there before the first one that was recorded
OP = "flopwise.op:"  # user metadata of an allocation: the number of the op that made it
PHASE = "flopwise."  # of what no op did: the phase it happened in
STACKS = ("python", "all", "off")
MOST_BYTES = 40 * 2**20  # 800,000 allocations, as many as a snapshot may have, are about this much
_OLD_SOURCES = {"closed form": SHAPES}  # as runs of November 2026 have it
_HINT = "the file is damaged, or flopwise did not write it; record it again"


class KnownOp(msgspec.Struct, frozen=True, array_like=True):
    """An op that allocated something. Words are numbers into `Knowledge.words`."""

    op: int
    module: int
    phase: int


class KnownTensor(msgspec.Struct, frozen=True, array_like=True):
    """One allocation and the tensor it was made for."""

    event: int  # in the trace of its device; BEFORE: it was there
    address: int
    bytes: int  # as asked for
    owner: int  # a word, as all that follow but the shape
    op: int
    module: int
    phase: int
    dtype: int
    saved_by: int  # the ops that asked autograd to keep it, with their modules
    shape: tuple[int, ...]


class Knowledge(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of the allocations of one device over the recorded steps."""

    schema: int = SCHEMA
    device: str  # 'cpu', 'cuda:0'
    steps: int  # recorded, the last one perhaps in part
    words: tuple[str, ...]
    ops: dict[int, KnownOp] = {}  # by their number, which the snapshot's metadata has
    tensors: tuple[KnownTensor, ...] = ()
    exact: bool = False  # these are all the allocations there are, and their bytes are what was allocated (the CPU)
    watched: bool = True  # every op was; if not (compiled steps, CUDA graphs), only parameters and buffers are here

    def word(self, number: int) -> str:
        """The word of this number; '' for one that is not there."""
        return self.words[number] if 0 <= number < len(self.words) else ""


class StoredPredictions(msgspec.Struct, frozen=True, kw_only=True):
    """The predictions that a run of `memory` keeps, so that reading it again needs neither torch nor time."""

    schema: int = SCHEMA
    predictions: tuple[MemoryPrediction, ...] = ()
    notes: tuple[str, ...] = ()


class Words:
    """Text, each once, by number.

    >>> words = Words()
    >>> words("mm"), words("exp"), words("mm"), words.all()
    (0, 1, 0, ('mm', 'exp'))
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, word: str) -> int:
        return self._numbers.setdefault(word, len(self._numbers))

    def all(self) -> tuple[str, ...]:
        return tuple(self._numbers)


def knowledge_path(snapshot: Path) -> Path:
    """Where the knowledge of a snapshot lies.

    >>> knowledge_path(Path("memory/1f.pickle")).name
    '1f.known.msgpack'
    """
    return snapshot.with_name(f"{snapshot.name.partition('.')[0]}.known.msgpack")


def predictions_path(snapshot: Path) -> Path:
    """Where the predictions of a snapshot lie."""
    return snapshot.with_name(f"{snapshot.name.partition('.')[0]}.predicted.json")


def read_knowledge(snapshot: Path) -> Knowledge | None:
    """The knowledge of a snapshot; None where there is none, as of anyone else's."""
    path = knowledge_path(snapshot)
    if not path.is_file():
        return None
    _refuse_larger(path)
    with _damage_refused(path):
        found = msgspec.msgpack.decode(path.read_bytes(), type=Knowledge)
    if found.schema > SCHEMA:
        raise FlopwiseError(f"{path.name} was written by a newer flopwise", "upgrade flopwise to read it")
    return found


def read_predictions(snapshot: Path) -> StoredPredictions:
    """The predictions of a snapshot; none where they are missing."""
    path = predictions_path(snapshot)
    if not path.is_file():
        return StoredPredictions()
    _refuse_larger(path)
    with _damage_refused(path):
        found = msgspec.json.decode(path.read_bytes(), type=StoredPredictions)
    known = [msgspec.structs.replace(one, source=_OLD_SOURCES.get(one.source, one.source)) for one in found.predictions]
    return msgspec.structs.replace(found, predictions=tuple(known))


def _refuse_larger(path: Path) -> None:
    if path.stat().st_size > MOST_BYTES:
        raise FlopwiseError(f"{path.name} is larger than {MOST_BYTES >> 20} MiB", _HINT)


@contextmanager
def _damage_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FlopwiseError(f"{path.name} cannot be read: {error}", _HINT) from None
    except OSError as error:
        raise FlopwiseError(f"cannot read {path}: {error.strerror}", _HINT) from None
