"""What is known of a recorded step's allocations: their owners, and where they came from."""

from collections.abc import Mapping, Sequence

from flopwise.capture.memory_watch import Recorder
from flopwise.capture.watch.modules import ModuleNames
from flopwise.capture.watch.tape import ALLOC, HOST
from flopwise.records.memory import BEFORE, Knowledge, KnownOp, KnownTensor, Words
from flopwise.spec.dtypes import dtype_name
from flopwise.work.operation import BUFFERS, PARAMETERS


def known(
    recorder: Recorder, owners: Sequence[str], places: Mapping[int, tuple[int, int]], exact: bool = False
) -> Knowledge:
    """What the recorder knows of the storages at these places (number -> event, address)."""
    tape, words = recorder.tape, Words()
    works = (op.work for op in tape.ops)
    ops = {n: KnownOp(words(work.op), words(work.module), words(work.phase)) for n, work in enumerate(works)}
    tensors = []
    built = {n for kind, n in tape.build.events if kind == ALLOC}
    for number, (event, address) in places.items():
        storage = tape.storages[number]
        if owners[number] == HOST:
            continue
        work = tape.ops[storage.op].work
        op, phase = ("", "") if number in built else (work.op, work.phase)
        labels = (owners[number], op, storage.module or work.module, phase, storage.dtype, recorder.savers(number))
        tensors.append(_tensor(words, event, address, storage.nbytes, labels, storage.shape))
    return Knowledge(device="", steps=0, words=words.all(), ops=ops, tensors=tuple(tensors), exact=exact)


def known_parameters(names: ModuleNames) -> Knowledge:
    """Of a step that could not be watched: its modules' parameters and buffers, by address."""
    words = Words()
    words("")
    tensors = []
    for owner, listed in ((PARAMETERS, names.parameters()), (BUFFERS, names.buffers())):
        for module, t in listed:
            labels = (owner, "", module, "", dtype_name(t.dtype), "")
            address = t.untyped_storage().data_ptr()
            tensors.append(_tensor(words, BEFORE, address, t.nbytes, labels, tuple(t.shape)))
    return Knowledge(device="", steps=0, words=words.all(), tensors=tuple(tensors))


def _tensor(
    words: Words, event: int, address: int, nbytes: int, labels: Sequence[str], shape: tuple[int, ...]
) -> KnownTensor:
    """`labels`: owner, op, module, phase, dtype and the ops that saved it."""
    owner, op, module, phase, dtype, saved_by = map(words, labels)
    return KnownTensor(event, address, nbytes, owner, op, module, phase, dtype, saved_by, shape)
