"""Ranks' files reduced on the nodes of a Ray cluster, which see them at the same paths as this machine."""

import os
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from flopwise.analysis.ranks.reading import RankTrace, UnreadableRank, read_rank
from flopwise.capture.runners.ray import RayCluster
from flopwise.errors import FlopwiseError, one_line

_ATTEMPTS_MORE = 2  # of a file whose worker or node was lost
_AHEAD = 2  # files for each CPU of the cluster that are on their way


def read_on_ray(jobs: Sequence[tuple[str, int, int]], address: str) -> Iterator[RankTrace | UnreadableRank]:
    """`read_rank(*job)` of every job, in order; `address`: as of RayCluster."""
    cluster = RayCluster(address)
    waiting: deque[tuple[str, Hashable]] = deque()
    try:
        cpus = sum(node.cpus for node in cluster.nodes())
        if cpus < 1:
            raise FlopwiseError("the Ray cluster has no CPU to read traces with", "ray start --num-cpus N adds some")
        task = cluster.ray.remote(read_rank).options(num_cpus=1, max_retries=_ATTEMPTS_MORE, name="flopwise explain")
        for path, *limits in jobs:
            place = os.path.abspath(path)
            waiting.append((place, task.remote(place, *limits)))
            if len(waiting) > _AHEAD * cpus:
                yield _read(cluster, *waiting.popleft())
        while waiting:
            yield _read(cluster, *waiting.popleft())
    finally:
        cluster.cancel([handle for _, handle in waiting], force=True)
        cluster.close()


def _read(cluster: RayCluster, path: str, handle: Hashable) -> RankTrace | UnreadableRank:
    """What a task found; a file whose tasks are lost is one that could not be read."""
    try:
        found: RankTrace | UnreadableRank = cluster.ray.get(handle)
    except cluster.ray.exceptions.RayError as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1:] or [type(error).__name__]
        return UnreadableRank(path, f"{path} could not be read on the cluster: {one_line(last[0])}")
    return found
