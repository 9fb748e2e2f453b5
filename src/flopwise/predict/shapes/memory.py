"""Memory on shapes: blocks that live as long as a tensor refers to them, told by owner, module and op."""

import functools
import weakref

BLOCK = 512  # the caching allocator's granularity
Key = tuple[str, str, str]  # owner, module without its layer's number, op


class Memory:
    """What is allocated now, and what was when most was.

    A block that goes is put on a list by `list.append`, and reckoned with before anything is asked: were our own code to run
    as it goes, Python would print an interrupt (Ctrl-C) that comes meanwhile and forget it.
    """

    def __init__(self) -> None:
        self._live: dict[Key, int] = {}
        self._live_bytes = 0
        self._leases: dict[int, _Lease] = {}
        self._gone: list[weakref.ref[Storage]] = []
        self.peak_bytes = 0
        self.peak: dict[Key, int] = {}
        self.made = 0

    @property
    def live(self) -> dict[Key, int]:
        """Bytes by owner, module and op, now."""
        self._settle()
        return self._live

    @property
    def live_bytes(self) -> int:
        """All of them."""
        self._settle()
        return self._live_bytes

    def allocate(self, storage: "Storage") -> None:
        self._settle()
        self.made += 1
        storage.number = self.made
        lease = self._leases[self.made] = _Lease(storage, self._gone.append)
        lease.number, lease.key, lease.n_bytes = self.made, storage.key, storage.n_bytes
        self._live[lease.key] = self._live.get(lease.key, 0) + lease.n_bytes
        self._live_bytes += lease.n_bytes
        if self._live_bytes > self.peak_bytes:
            self.mark_peak()

    def move(self, number: int, key: Key) -> None:
        """The same bytes under another key."""
        lease = self._leases[number]
        self._live[lease.key] -= lease.n_bytes
        lease.key = key
        self._live[key] = self._live.get(key, 0) + lease.n_bytes

    def _settle(self) -> None:
        while self._gone:
            lease = self._gone.pop()
            assert isinstance(lease, _Lease)
            del self._leases[lease.number]
            self._live[lease.key] -= lease.n_bytes
            self._live_bytes -= lease.n_bytes

    def mark_peak(self) -> None:
        """Take this moment for the peak; called anew at the start of every phase."""
        self.peak_bytes, self.peak = self.live_bytes, self.live.copy()


class Storage:
    """A block of memory; it is given back when the last tensor on it goes."""

    __slots__ = ("__weakref__", "key", "memory", "n_bytes", "number")

    def __init__(self, memory: Memory, n_bytes: int, key: Key) -> None:
        self.memory, self.key, self.number = memory, key, 0
        self.n_bytes = -(-n_bytes // BLOCK) * BLOCK
        memory.allocate(self)

    def now_owned_by(self, owner: str) -> None:
        """The same bytes under another owner: a temporary that is kept for the backward pass, a gradient that stays."""
        self.key = (owner, *self.key[1:])
        self.memory.move(self.number, self.key)


class _Lease(weakref.ref[Storage]):
    """What a block held, for when it is no more."""

    __slots__ = ("key", "n_bytes", "number")
    key: Key
    n_bytes: int
    number: int


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
