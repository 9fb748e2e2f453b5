"""Exchanges over a cluster: groups of ranks, the links between them, and how long a message takes."""

from typing import NamedTuple

from flopwise.predict.parallel import constants as fitted
from flopwise.spec.cluster import Cluster
from flopwise.work.collective import ALL_REDUCE, ALL_TO_ALL, SEND_RECEIVE, bus_factor


class Group(NamedTuple):
    """Ranks that exchange: how many, and how far the next one is; ranks are numbered domain by domain."""

    ranks: int
    stride: int = 1

    def near(self, cluster: Cluster) -> int:
        """How many of them share a domain."""
        return max(1, min(self.ranks, cluster.domain // self.stride))


def exchange_s(kind: str, n_bytes: float, group: Group, cluster: Cluster) -> float:
    """Of one exchange, alone. `n_bytes`: of the larger of a rank's two buffers.

    >>> from flopwise.spec.cluster import cluster
    >>> near, far = (exchange_s("all-reduce", 1e9, Group(8, stride), cluster("dgx-h100")) for stride in (1, 8))
    >>> far > 4 * near
    True
    """
    if group.ranks < 2 or not n_bytes:
        return 0.0
    near = group.near(cluster)
    inside = cluster.inside_bytes_s * fitted.LINK_SHARES["inside"]
    out = cluster.between_bytes_s * fitted.LINK_SHARES["between"]
    if cluster.spine and group.ranks * group.stride > cluster.spine:
        # Of a pod's ranks one sends over the spine, if they are in order: it is enough if they are as many as it is narrower.
        out /= max(1.0, cluster.oversubscribed * group.stride / cluster.spine)
    domains = -(-group.ranks // near)
    place = "inside" if domains == 1 else "between"
    known = cluster.inside_start_ns if domains == 1 else cluster.between_start_ns
    start = 1e-9 * (fitted.MESSAGE_NS[place] if known is None else known)
    if kind == SEND_RECEIVE:
        return start + n_bytes / (inside if domains == 1 else out)
    if kind == ALL_TO_ALL:
        far = n_bytes * (domains - 1) / domains
        return start + max(n_bytes * bus_factor(kind, near) / inside if near > 1 else 0.0, far / out)
    # A ring goes once through all ranks of a domain, then out: with a port of each rank of it.
    speed = inside if domains == 1 else min(inside, near * out) if near > 1 else out
    return start + 1e-9 * ring_hops_ns(kind, group, cluster) + n_bytes * bus_factor(kind, group.ranks) / speed


def ring_hops_ns(kind: str, group: Group, cluster: Cluster) -> float:
    """What a ring costs for each rank that it goes through, whatever it carries; an all-reduce goes round twice."""
    domains = -(-group.ranks // group.near(cluster))
    once = (group.ranks - domains) * fitted.HOP_NS["inside"] + (domains - 1) * fitted.HOP_NS["between"]
    return (2 if kind == ALL_REDUCE else 1) * once
