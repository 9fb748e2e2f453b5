"""One kind of cluster: which GPUs, how many share the fast links, and what each can send beyond them."""

import msgspec

from flopwise.spec import fields


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs in domains: within one all reach all over the fast links; between domains each has its part of the network."""

    name: str
    title: str
    gpu: str  # its name in spec/gpu.py
    domain: int  # GPUs that share the fast links: 8 of an HGX board, 72 of an NVL72 rack
    inside_bytes_s: float  # one GPU, one direction, by the datasheet
    between_bytes_s: float  # one GPU's part of its host's network, one direction
    inside_start_ns: float | None = None  # what an exchange costs to begin, where that was measured
    between_start_ns: float | None = None
    host: int = 8  # GPUs of one host
    oversubscribed: float = 1.0  # by how much the spine carries less than the leaves
    spine: int = 0  # GPUs that reach each other without the spine; 0: no limit is known
    power: float = 1.0  # of what this kind of chip usually may take: 5/7 where 700 W are held at 500
    memory_bytes: int | None = None  # of a GPU, where it is not what its datasheet says
    price: float | None = None  # of a GPU for an hour, in dollars, where the facts state one
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("name", "title", "gpu"):
            fields.text(field, getattr(self, field))
        fields.whole("domain", self.domain, 1, 1_000_000)
        fields.whole("host", self.host, 1, 1_000)
        fields.whole("spine", self.spine, 0, 10_000_000)
        for field in ("inside_bytes_s", "between_bytes_s"):
            fields.number(field, getattr(self, field), 1e6, 1e14)
        for field in ("inside_start_ns", "between_start_ns"):
            if getattr(self, field) is not None:
                fields.number(field, getattr(self, field), 0.0, 1e9)
        fields.number("power", self.power, 0.1, 2.0)
        fields.number("oversubscribed", self.oversubscribed, 1.0, 100.0)
        if self.memory_bytes is not None:
            fields.whole("memory_bytes", self.memory_bytes, 1, 10**15)
        if self.price is not None:
            fields.number("price", self.price, 0.0, 1e6)
