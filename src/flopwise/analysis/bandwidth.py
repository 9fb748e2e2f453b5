"""Work that is bound by memory: what its bytes take at full bandwidth, and what it took beyond."""

from collections.abc import Mapping, Sequence

from flopwise.analysis.attention import is_core
from flopwise.records.ceilings import Ceilings
from flopwise.work.operation import ATTENTION, COMMUNICATION, MATMUL, OPTIMIZER, OpWork

Key = tuple[str, str]  # phase ('' where it is not known) and class
_NOT_HERE = (MATMUL, ATTENTION, COMMUNICATION, OPTIMIZER)
_CASTS = ("flopwise::fp8_cast", "flopwise::fp8_amax")  # a part of their own


def bytes_ns(ops: Sequence[OpWork], ceilings: Ceilings, *, phases: bool) -> dict[Key, float]:
    """What the bytes of memory-bound operations take at full bandwidth, by phase (if `phases`) and class.

    Of the operations of a step without the matmuls, attention, the optimizer, casts to fp8, and what is computed again.
    """
    found: dict[Key, float] = {}
    for op in ops:
        apart = op.kind in _NOT_HERE or op.op in _CASTS or op.phase in ("optimizer", "recompute")
        if op.kernels and not apart and not is_core(op):
            key = op.phase if phases else "", op.kind
            moved = op.read_bytes + op.write_bytes
            found[key] = found.get(key, 0.0) + 1e9 * moved / ceilings.bandwidth_bytes_per_s
    return found


def at_bandwidth(took: Mapping[Key, float], least: Mapping[Key, float]) -> dict[Key, float]:
    """Of what each phase and class took, what its bytes take at full bandwidth; never more than it took: data that lies in
    the cache is moved faster.

    Kernels and operations are not always of the same class. Bytes of a class without kernels count in the same phase for
    those classes that have kernels and no bytes, in proportion to their time.

    >>> at_bandwidth({("forward", "loss"): 10.0, ("forward", "copy/cast"): 3.0}, {("forward", "softmax"): 4.0})
    {('forward', 'loss'): 3.076923076923077, ('forward', 'copy/cast'): 0.9230769230769231}
    """
    found = {key: min(ns, least.get(key, 0.0)) for key, ns in took.items()}
    for phase in {phase for phase, _ in took}:
        loose = sum(ns for key, ns in least.items() if key[0] == phase and not took.get(key))
        open_keys = [key for key in took if key[0] == phase and key not in least]
        room = sum(took[key] for key in open_keys)
        for key in open_keys:
            found[key] = took[key] * min(1.0, loose / room) if room else 0.0
    return found
