"""From a watched step: whose every allocation was, and where it came from."""

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
    tensors, ops = (
        [],
        {n: KnownOp(words(op.work.op), words(op.work.module), words(op.work.phase)) for n, op in enumerate(tape.ops)},
    )
    built = {n for kind, n in tape.build.events if kind == ALLOC}
    for number, (event, address) in places.items():
        storage = tape.storages[number]
        if owners[number] == HOST:
            continue
        work = tape.ops[storage.op].work
        in_build = number in built
        tensors.append(
            KnownTensor(
                event=event,
                address=address,
                bytes=storage.nbytes,
                owner=words(owners[number]),
                op=words("" if in_build else work.op),
                module=words(storage.module or work.module),
                phase=words("" if in_build else work.phase),
                dtype=words(storage.dtype),
                saved_by=words(recorder.savers(number)),
                shape=storage.shape,
            )
        )
    return Knowledge(device="", steps=0, words=words.all(), ops=ops, tensors=tuple(tensors), exact=exact)


def known_parameters(names: ModuleNames) -> Knowledge:
    """Of a step that could not be watched: its modules' parameters and buffers, by address."""
    words = Words()
    none = words("")
    tensors = tuple(
        KnownTensor(
            event=BEFORE, address=t.untyped_storage().data_ptr(), bytes=t.nbytes, owner=words(owner), op=none,
            module=words(module), phase=none, dtype=words(dtype_name(t.dtype)), saved_by=none, shape=tuple(t.shape),
        )
        for owner, listed in ((PARAMETERS, names.parameters()), (BUFFERS, names.buffers()))
        for module, t in listed
    )  # fmt: skip
    return Knowledge(device="", steps=0, words=words.all(), tensors=tensors)
