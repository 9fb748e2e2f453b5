"""The one model of PyTorch's caching allocator on a GPU: what it counts as allocated and what it has reserved.

`torch.cuda.memory_allocated` counts blocks, not bytes asked for, and a block can be larger than what was asked for: sizes
are rounded up to 512 B, and a block that is cut leaves more than 1 MiB or is given whole. On a 12-block model that is 2 MB,
on others 1 % of all. So the law of the allocator is followed here (c10/cuda/CUDACachingAllocator.cpp of torch 2.11, without
expandable segments). Addresses of new segments are unknown; they are taken to rise.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL = 1 << 20  # a request up to here is served from 2 MiB segments
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20  # a request from here on gets a segment of its own size, rounded up to 2 MiB
LARGE_ROUND = 2 << 20


def rounded(nbytes: int, unit: int = MIN_BLOCK) -> int:
    """A size as the allocator rounds it up.

    >>> rounded(1), rounded(512), rounded(0)
    (512, 512, 0)
    """
    return -(-nbytes // unit) * unit


def unsplit_bytes(sizes: Iterable[int]) -> int:
    """What tensors allocated one after the other from a fresh allocator hold beyond their own rounded bytes.

    A weight of 25 MiB sits in a segment of 26 MiB, and the allocator reports 26.

    >>> unsplit_bytes([25 * 2**20]), unsplit_bytes([24 * 2**20])
    (1048576, 0)
    """
    allocator, asked = CachingAllocator(), 0
    for size in sizes:
        allocator.allocate(size)
        asked += rounded(size)
    return allocator.allocated_bytes - asked


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, free or given out."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """Allocates and frees numbers of bytes, and keeps the count.

    >>> gpu = CachingAllocator()
    >>> block = gpu.allocate(30_720_000)  # 10,000 × 768 fp32: 0.7 MiB of the segment are too little to cut off
    >>> gpu.allocated_bytes, gpu.reserved_bytes
    (31457280, 31457280)
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), sorted
        self._at: dict[int, Block] = {}  # free blocks by address
        self._next_address = 0

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least so many bytes; nothing at all for none."""
        if not nbytes:
            return None
        size = rounded(nbytes)
        block = self._best_fit(size) or self._new_segment(size)
        left = block.size - size
        if left >= MIN_BLOCK if block.small else left > SMALL:
            self._cut(block, size)
        block.free = False
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back; it grows together with free neighbours."""
        if block is None:
            return
        self.allocated_bytes -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                if other is block.before:
                    block.address, block.before = other.address, other.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
                block.size += other.size
        self._put(block)

    def _best_fit(self, size: int) -> Block | None:
        blocks = self._free[size <= SMALL]
        at = bisect_left(blocks, (size, -1))
        if at == len(blocks):
            return None
        block = self._at[blocks[at][1]]
        self._take(block)
        return block

    def _new_segment(self, size: int) -> Block:
        small = size <= SMALL
        if small:
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE:
            segment = LARGE_SEGMENT
        else:
            segment = rounded(size, LARGE_ROUND)
        block = Block(self._next_address, segment, small)
        self._next_address += segment + LARGE_ROUND  # never adjacent: segments do not grow together
        self.reserved_bytes += segment
        return block

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._put(rest)

    def _put(self, block: Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.small], (block.size, block.address))

    def _take(self, block: Block) -> None:
        block.free = False
        del self._at[block.address]
        blocks = self._free[block.small]
        del blocks[bisect_left(blocks, (block.size, block.address))]
