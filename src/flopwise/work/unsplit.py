"""What PyTorch's caching allocator adds to the tensors themselves (c10/cuda/CUDACachingAllocator.cpp)."""

from collections.abc import Iterable

_MIB = 2**20
BLOCK = 512  # every size is rounded up to this
_SMALL = _MIB  # up to this a tensor shares a 2 MiB segment; and a rest no larger than this stays with its neighbour
_MEDIUM, _SEGMENT = 10 * _MIB, 20 * _MIB  # below 10 MiB tensors share segments of 20 MiB
_ROUND = 2 * _MIB  # larger ones get a segment of their own, rounded up to this


def unsplit_bytes(sizes: Iterable[int]) -> int:
    """What tensors allocated one after the other from a fresh allocator hold beyond their own bytes.

    A block is split only if more than 1 MiB would be left over; otherwise the tensor keeps the rest. A weight of
    25 MiB sits in a segment of 26 MiB, and the allocator reports 26.

    >>> unsplit_bytes([25 * 2**20]), unsplit_bytes([24 * 2**20])
    (1048576, 0)
    """
    kept, free = 0, list[int]()
    for size in sizes:
        n_bytes = -(-size // BLOCK) * BLOCK
        if n_bytes <= _SMALL:
            continue  # small blocks are split to the byte
        fitting = [block for block in free if block >= n_bytes]
        if fitting:
            block = min(fitting)
            free.remove(block)
        else:
            block = _SEGMENT if n_bytes < _MEDIUM else -(-n_bytes // _ROUND) * _ROUND
        rest = block - n_bytes
        if rest > _SMALL:
            free.append(rest)
        else:
            kept += rest
    return kept
