"""Communication by kind: what can be done about it depends on that."""

import re

import polars as pl

from flopwise.trace.tables import Trace
from flopwise.work.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, SEND_RECEIVE
from flopwise.work.operation import COMMUNICATION

__all__ = ["ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BROADCAST", "OTHER", "REDUCE_SCATTER", "SEND_RECEIVE"]
__all__ += ["collectives", "kind_of"]

OTHER = "other"
_KINDS = {
    ALL_TO_ALL: re.compile(r"(?i)all_?to_?all|a2a|deep_?ep|(?:dispatch|combine)(?:_|\b|<)"),
    ALL_REDUCE: re.compile(r"(?i)all_?reduce|cross_device_reduce"),
    REDUCE_SCATTER: re.compile(r"(?i)reduce_?scatter"),
    ALL_GATHER: re.compile(r"(?i)all_?gather"),
    BROADCAST: re.compile(r"(?i)broadcast"),
    SEND_RECEIVE: re.compile(r"(?i)send_?recv|(?<![a-z])(?:send|recv)(?![a-z])"),
}
_EXCHANGES = re.compile(r"(?i)^(?:nccl|c10d|record).*all_?to_?all")


def kind_of(name: str) -> str:
    """The kind of a kernel or op, by its name.

    >>> [kind_of(name) for name in ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "c10d::alltoall_base_", "ncclKernel")]
    ['all-reduce', 'all-to-all', 'other']
    """
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), OTHER)


def collectives(work: pl.DataFrame, trace: Trace, n: int) -> dict[str, float]:
    """GPU time by kind, per step, the longest first; `work` are an Attribution's rows of `n` steps.

    NCCL's kernels for an all-to-all are those for sending and receiving: the op above them tells, or else that the trace
    names no other exchange.
    """
    exchanges = any(_EXCHANGES.search(name) for name in trace.names)
    texts = pl.col("name", "top_op").cast(pl.String).fill_null("")
    rows = work.filter(pl.col("class") == COMMUNICATION).select(texts, "duration_ns")
    spent: dict[str, float] = {}
    for name, op, ns in rows.group_by("name", "top_op").agg(pl.col("duration_ns").sum()).iter_rows():
        kind = kind_of(name)
        if kind in (SEND_RECEIVE, OTHER) and (above := kind_of(op)) != OTHER:
            kind = above
        elif kind == SEND_RECEIVE and exchanges:
            kind = ALL_TO_ALL
        spent[kind] = spent.get(kind, 0.0) + ns / n
    return dict(sorted(spent.items(), key=lambda item: (-item[1], item[0])))
