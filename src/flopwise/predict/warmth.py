"""Which bytes the cache still has: a kernel that reads what was written a moment ago does not wait for the memory."""

from collections.abc import Sequence

from flopwise.work.operation import OpWork


def cold_bytes(ops: Sequence[OpWork], cached_bytes: float) -> list[float]:
    """By operation, how many of the bytes that it reads lie in memory alone.

    A tensor stays in the cache until as many bytes have gone through it as it holds. What was touched in the step before
    has left it, and a cache of no size is one of which nothing is known: nothing is cold then.

    >>> op = OpWork(op="add", module="", phase="forward", kind="elementwise", dtype="fp32", reads=((1, 40),), writes=((2, 40),))
    >>> cold_bytes([op, op, op], cached_bytes=100.0)
    [40.0, 0.0, 0.0]
    """
    if not cached_bytes:
        return [0.0] * len(ops)
    passed, touched, cold = 0.0, dict[int, float](), []
    for op in ops:
        far = [size for tensor, size in op.reads if passed - touched.get(tensor, -cached_bytes) >= cached_bytes]
        cold.append(float(sum(far)))
        for tensor, size in (*op.reads, *op.writes):
            passed += size
            touched[tensor] = passed
    return cold
