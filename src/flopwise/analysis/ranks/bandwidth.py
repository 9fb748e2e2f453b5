"""Algorithm bandwidth of collectives, as NCCL's tests define it, and what the link can do."""

from flopwise.spec.gpu import find_gpu
from flopwise.spec.links import Links

_ONE_HOST = 8  # ranks that fit one host, where the traces do not name their hosts. Judgement


def algorithm_bytes_s(n_bytes: float | None, ns: float) -> float | None:
    """Bytes of the larger buffer of a rank, by the time that they took.

    >>> algorithm_bytes_s(1000, 10)
    100000000000.0
    """
    return n_bytes / ns * 1e9 if n_bytes and n_bytes > 0 and ns > 0 else None


def across_hosts(hosts: set[str], world: int) -> bool | None:
    """Whether ranks on these hosts talk over a network; None where that is not known."""
    if "" in hosts or not hosts:
        return False if 0 < world <= _ONE_HOST else None
    return len(hosts) > 1


def link_limit(given: Links | None, gpu: str, across: bool | None) -> float | None:
    """By what the user named, else by the GPU's own links within a host."""
    if given is not None:
        return (
            given.between
            if across
            else given.inside
            if across is False
            else min(one for one in (given.inside, given.between) if one is not None)
        )
    known = find_gpu(gpu) if gpu else None
    if known is None or known.link_bytes_s is None or across is not False:
        return None
    return known.link_bytes_s / 2  # vendors add up both directions
