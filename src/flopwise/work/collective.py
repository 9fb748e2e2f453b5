"""Collectives: their kinds, and what each makes a link carry."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, BROADCAST, SEND_RECEIVE = "all-to-all", "broadcast", "send and receive"


def op_kind(operation: str) -> str:
    """The kind of a workload's operation.

    >>> op_kind("all-gather"), op_kind("send-recv")
    ('all-gather', 'send and receive')
    """
    return SEND_RECEIVE if operation == "send-recv" else operation


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that a rank's link carries in one direction, for each byte of the larger of its two buffers.

    As NCCL's tests define bus bandwidth (nccl-tests, doc/PERFORMANCE.md). Alone, a rank has only its own copy to make.

    >>> bus_factor(ALL_REDUCE, 8), bus_factor(ALL_GATHER, 8), bus_factor(BROADCAST, 8)
    (1.75, 0.875, 1.0)
    """
    if ranks < 2:
        return 1.0
    if kind == ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL) else 1.0


def hops(kind: str, ranks: int) -> int:
    """Messages that come one after the other when a ring does it.

    >>> hops(ALL_REDUCE, 8), hops(ALL_GATHER, 8), hops(SEND_RECEIVE, 8)
    (14, 7, 1)
    """
    if kind == SEND_RECEIVE:
        return 1
    return (2 if kind == ALL_REDUCE else 1) * (ranks - 1)
