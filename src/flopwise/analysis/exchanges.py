"""Measured collectives: their bandwidths, and the latency and bandwidth that all sizes of a run give."""

from collections.abc import Iterable

import msgspec

from flopwise.analysis.clocks import step_level
from flopwise.errors import FlopwiseError
from flopwise.predict.collectives import CollectiveRow, CollectiveTime, fit
from flopwise.predict.parallel.measured_links import with_measured_links
from flopwise.records.run import OK, Point
from flopwise.spec.cluster_facts import Cluster
from flopwise.spec.dtypes import named
from flopwise.spec.operations import OpSpec, message_bytes
from flopwise.work.collective import bus_factor, op_kind


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One collective with its time; bytes and bandwidths as NCCL's tests count them.

    >>> one = Exchange(kind="all-reduce", ranks=4, backend="nccl", device="cuda", message_bytes=10**9, time_ns=10**7)
    >>> one.algorithm_bytes_per_s / 1e9, one.bus_bytes_per_s / 1e9
    (100.0, 150.0)
    """

    kind: str
    ranks: int
    backend: str
    device: str  # 'cpu' or 'cuda'
    message_bytes: int  # the larger of a rank's two buffers
    time_ns: float  # median of the first rank's

    @property
    def algorithm_bytes_per_s(self) -> float:
        return 1e9 * self.message_bytes / self.time_ns

    @property
    def bus_bytes_per_s(self) -> float:
        """What a link carries in one direction: the same for any number of ranks that are limited by it."""
        return self.algorithm_bytes_per_s * bus_factor(self.kind, self.ranks)


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one backend's sizes of one kind give, over so many ranks."""

    backend: str
    device: str
    sizes: int
    time: CollectiveTime

    @property
    def error(self) -> float | None:
        """Median relative error; None of two sizes, through which every line goes."""
        return self.time.miss if self.sizes > 2 else None


def exchange(point: Point) -> Exchange | None:
    """The collective that a point measured; None of other steps, and of one that failed."""
    work, ran = point.trial.workload, point.ran
    op = work.subject
    if not (isinstance(op, OpSpec) and op.collective and ran):
        return None
    step = step_level(point)
    if step is None or step.wall_ns <= 0:
        return None
    return Exchange(
        kind=op_kind(op.name),
        ranks=work.recipe.ranks,
        backend=ran.backend,
        device=ran.device.partition(":")[0],
        message_bytes=message_bytes(op, work.recipe.ranks, named(work.recipe.precision).n_bytes),
        time_ns=step.wall_ns,
    )


def link_fits(points: Iterable[Point]) -> tuple[LinkFit, ...]:
    """For each backend, kind and number of ranks of which two sizes or more were measured."""
    groups: dict[tuple[str, str, str, int], list[Exchange]] = {}
    for point in points:
        if point.status == OK and (one := exchange(point)) is not None:
            groups.setdefault((one.backend, one.device, one.kind, one.ranks), []).append(one)
    found = []
    for (backend, device, _, _), group in groups.items():
        sizes = len({one.message_bytes for one in group})
        if sizes > 1:
            (time,) = fit(CollectiveRow(one.kind, one.ranks, one.message_bytes, one.time_ns) for one in group)
            found.append(LinkFit(backend=backend, device=device, sizes=sizes, time=time))
    return tuple(found)


def measured_times(points: Iterable[Point], backend: str = "") -> tuple[CollectiveTime, ...]:
    """The model that `predict.collectives.collective_time` takes, from the points of a run; of one backend, or NCCL's first.

    Ranks on the CPU and on GPUs do not mix: those on GPUs count, where there are any.
    """
    fits = [one for one in link_fits(points) if backend in ("", one.backend)]
    best = max(fits, key=lambda one: (one.device == "cuda", one.backend == "nccl"), default=None)
    return tuple(one.time for one in fits if best and (one.device, one.backend) == (best.device, best.backend))


def measured_cluster(cluster: Cluster, points: Iterable[Point]) -> Cluster:
    """The cluster as the collectives of a run (`op:all-reduce` …) found its links: a plan's times follow from it."""
    points = list(points)
    if not any(one.device == "cuda" for one in link_fits(points)):
        raise FlopwiseError(
            "the run has no collective of GPUs in two sizes or more",
            "measure some: flopwise bench op:all-reduce --ranks 8 --set bytes=1000000, and again with 1000000000",
        )
    return with_measured_links(cluster, measured_times(points))
