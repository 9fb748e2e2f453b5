"""Measured collectives in place of a cluster's datasheet: what its links carry, and what an exchange costs to begin."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.predict.collectives import CollectiveTime
from flopwise.predict.parallel import constants as fitted
from flopwise.predict.parallel.topology import Group, ring_hops_ns
from flopwise.spec.cluster_facts import Cluster
from flopwise.work.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

_RINGS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)  # whose time is one rate and one start; the others follow from these


class _Link(NamedTuple):
    bytes_s: float  # of a rank's part of the ring
    start_ns: float
    group: Group


def with_measured_links(cluster: Cluster, measured: Sequence[CollectiveTime]) -> Cluster:
    """The cluster with the links that were measured: within a domain by ranks that fit into one, between them by more ranks.

    What was not measured stays as it is known. Of several numbers of ranks the largest counts.

    >>> from flopwise.predict.collectives import CollectiveRow, fit
    >>> from flopwise.predict.parallel.topology import exchange_s
    >>> from flopwise.spec.cluster import cluster
    >>> rows = [CollectiveRow(ALL_REDUCE, 8, n, 40_000 + n / 200) for n in (10_000, 1_000_000, 1_000_000_000)]
    >>> mine = with_measured_links(cluster("dgx-h100"), fit(rows))
    >>> round(1e3 * exchange_s(ALL_REDUCE, 1e9, Group(8), mine), 2)
    5.04
    """
    inside = _link(cluster, [one for one in measured if 1 < one.ranks <= cluster.domain])
    between = _link(cluster, [one for one in measured if one.ranks > cluster.domain])
    changes: dict[str, object] = {}
    if inside is not None:
        rate = inside.bytes_s / fitted.LINK_SHARES["inside"]
        changes |= {"inside_bytes_s": rate, "inside_start_ns": inside.start_ns}
    if between is not None:  # a ring leaves a domain by the ports of all its ranks
        rate = between.bytes_s / between.group.near(cluster) / fitted.LINK_SHARES["between"]
        changes |= {"between_bytes_s": rate, "between_start_ns": between.start_ns}
    if not changes:
        raise FlopwiseError(
            "no collective of two ranks or more was measured that says how fast the links are",
            f"flopwise bench op:all-reduce --ranks {min(8, cluster.domain)}, of two sizes or more",
        )
    said = [f"collectives measured over {link.group.ranks} ranks" for link in (inside, between) if link is not None]
    return msgspec.structs.replace(cluster, **changes, sources=(*cluster.sources, *said))


def _link(cluster: Cluster, measured: Sequence[CollectiveTime]) -> _Link | None:
    """The median of what each kind of ring says."""
    rings = [(one, speed) for one in measured if one.kind in _RINGS and (speed := one.bus_bytes_s) is not None]
    if not rings:
        return None
    group = Group(max(one.ranks for one, _ in rings))
    largest = [(one, speed) for one, speed in rings if one.ranks == group.ranks]
    starts = [one.latency_ns - ring_hops_ns(one.kind, group, cluster) for one, _ in largest]
    return _Link(median(speed for _, speed in largest), max(0.0, median(starts)), group)
