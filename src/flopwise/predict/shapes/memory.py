"""Memory on shapes: blocks that live as long as a tensor refers to them, told by owner, module and op."""

import functools
import weakref

from flopwise.work.allocator import MIN_BLOCK

Key = tuple[str, str, str]  # owner, module without its layer's number, op


class Memory:
    """What is allocated now, and what was when most was.

    A block that goes is put on a list by `list.append`, and accounted for before anything is asked: were our own code to run
    as it goes, Python would print an interrupt (Ctrl-C) that comes meanwhile and forget it.
    """

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._gone: list[weakref.ref[Storage]] = []
        self._live_bytes = self.peak_bytes = 0
        self._base: dict[Key, int] = {}  # what lived when the log began
        self._log: list[tuple[Key, int]] = []  # bytes that came and went since then
        self._peak_at = 0  # the log's length at the peak
        self.made = 0

    @property
    def live(self) -> dict[Key, int]:
        """Bytes by owner, module and op, now."""
        self._settle()
        return self._after(len(self._log))

    @property
    def peak(self) -> dict[Key, int]:
        """The same at the peak."""
        return self._after(self._peak_at)

    def _after(self, entries: int) -> dict[Key, int]:
        found = self._base.copy()
        for key, n_bytes in self._log[:entries]:
            found[key] = found.get(key, 0) + n_bytes
        return found

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
        self._log.append((lease.key, lease.n_bytes))
        self._live_bytes += lease.n_bytes
        if self._live_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_at = self._live_bytes, len(self._log)

    def move(self, number: int, key: Key) -> None:
        """The same bytes under another key."""
        lease = self._leases[number]
        self._log += ((lease.key, -lease.n_bytes), (key, lease.n_bytes))
        lease.key = key

    def _settle(self) -> None:
        while self._gone:
            lease = self._gone.pop()
            assert isinstance(lease, _Lease)
            del self._leases[lease.number]
            self._log.append((lease.key, -lease.n_bytes))
            self._live_bytes -= lease.n_bytes

    def mark_peak(self) -> None:
        """Take this moment for the peak; called anew at the start of every phase."""
        self._base = self.live
        self._log, self._peak_at, self.peak_bytes = [], 0, self._live_bytes


class Storage:
    """A block of memory; it is given back when the last tensor on it goes."""

    __slots__ = ("__weakref__", "gradients", "key", "memory", "n_bytes", "number")

    def __init__(self, memory: Memory, n_bytes: int, key: Key) -> None:
        self.memory, self.key, self.number = memory, key, 0
        self.gradients = 0  # that lie in it and wait for a node, or stay with a weight
        self.n_bytes = -(-n_bytes // MIN_BLOCK) * MIN_BLOCK
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
