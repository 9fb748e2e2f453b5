"""Memory on shapes: blocks that live as long as a tensor refers to them, told by owner, module and op."""

import functools

BLOCK = 512  # the caching allocator's granularity
Key = tuple[str, str, str]  # owner, module without its layer's number, op


class Memory:
    """What is allocated now, and what was when most was."""

    def __init__(self) -> None:
        self.live: dict[Key, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak: dict[Key, int] = {}
        self.made = 0

    def allocate(self, storage: "Storage") -> None:
        self.made += 1
        storage.number = self.made
        self.live[storage.key] = self.live.get(storage.key, 0) + storage.n_bytes
        self.live_bytes += storage.n_bytes
        if self.live_bytes > self.peak_bytes:
            self.mark_peak()

    def mark_peak(self) -> None:
        """Take this moment for the peak; called anew at the start of every phase."""
        self.peak_bytes, self.peak = self.live_bytes, self.live.copy()


class Storage:
    """A block of memory; it is given back when the last tensor on it goes."""

    __slots__ = ("key", "memory", "n_bytes", "number")

    def __init__(self, memory: Memory, n_bytes: int, key: Key) -> None:
        self.memory, self.key, self.number = memory, key, 0
        self.n_bytes = -(-n_bytes // BLOCK) * BLOCK
        memory.allocate(self)

    def __del__(self) -> None:
        self.memory.live[self.key] -= self.n_bytes
        self.memory.live_bytes -= self.n_bytes

    def now_owned_by(self, owner: str) -> None:
        """The same bytes under another owner: a temporary that is kept for the backward pass, a gradient that stays."""
        live = self.memory.live
        live[self.key] -= self.n_bytes
        self.key = (owner, *self.key[1:])
        live[self.key] = live.get(self.key, 0) + self.n_bytes


def by_owner(live: dict[Key, int]) -> dict[str, int]:
    """Bytes by owner, the empty ones left out.

    >>> by_owner({("gradients", "head", ""): 8, ("gradients", "norm", ""): 4, ("logits", "", ""): 0})
    {'gradients': 12}
    """
    owners: dict[str, int] = {}
    for (owner, _, _), n_bytes in live.items():
        if n_bytes:
            owners[owner] = owners.get(owner, 0) + n_bytes
    return owners


@functools.cache
def without_layer(module: str) -> str:
    """A module's name without its layer: layers are alike.

    >>> without_layer("blocks.3.mlp.up")
    'blocks.mlp.up'
    """
    return ".".join(part for part in module.split(".") if not part.isdigit())
