"""How many threads and streams of a trace are told apart: much is done for each of them, and no program has thousands."""

from collections.abc import Iterable

import polars as pl

from flopwise.records.note import Note, counted
from flopwise.trace.tables import NO_ID

MOST_PROCESSES, MOST_THREADS, MOST_DEVICES, MOST_STREAMS = 64, 256, 64, 512


def fold_lanes(tables: dict[str, pl.DataFrame]) -> tuple[Note, ...]:
    """Make those beyond the busiest unknown, in place; notes say how many rows that concerns."""
    processes = _fold(tables, ["process"], MOST_PROCESSES)
    threads = _fold(tables, ["process", "thread"], MOST_THREADS)
    devices = _fold(tables, ["device"], MOST_DEVICES)
    streams = _fold(tables, ["device", "stream"], MOST_STREAMS)
    return counted(
        processes=(processes, "event", f"of other processes than the {MOST_PROCESSES} busiest: not told apart"),
        threads=(threads, "event", f"of other threads than the {MOST_THREADS} busiest: not told apart"),
        other_devices=(devices, "event", f"of other devices than the {MOST_DEVICES} busiest: not told apart"),
        streams=(streams, "event", f"of other streams than the {MOST_STREAMS} busiest: not told apart"),
    )


def _fold(tables: dict[str, pl.DataFrame], keys: list[str], most: int) -> int:
    """Keep the lanes that most rows have; the last key of the others becomes NO_ID. How many rows that were."""
    mine = {name: table for name, table in tables.items() if table.height and set(keys) <= set(table.columns)}
    outer, last = keys[0], keys[-1]
    if _distinct(mine.values(), outer) == 1:
        keys = [last]  # one process, one device: looked at alone, which is faster
    if len(keys) == 1 and _distinct(mine.values(), last) <= most:
        return 0
    counts = pl.concat(
        [table.group_by(pl.col(keys).cast(pl.Int64)).len("n") for table in mine.values()] or [pl.DataFrame()]
    )
    if counts.height <= most:
        return 0
    ranked = counts.group_by(keys).agg(pl.col("n").sum()).sort("n", *keys, descending=[True, *[False] * len(keys)])
    if ranked.height <= most:
        return 0
    kept = ranked.head(most).select(keys).with_columns(kept=True)
    for name, table in mine.items():
        known = table.select(pl.col(keys).cast(pl.Int64)).join(kept, on=keys, how="left", maintain_order="left")["kept"]
        value = pl.when(known.fill_null(False)).then(last).otherwise(NO_ID).cast(table.schema[last])
        tables[name] = table.with_columns(value.alias(last))
    return int(ranked["n"].slice(most).sum())


def _distinct(tables: Iterable[pl.DataFrame], column: str) -> int:
    """At least so many values, of all tables together; none is counted twice."""
    return len(set().union(*(table[column].unique().to_list() for table in tables)))
