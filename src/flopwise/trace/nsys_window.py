"""Which part of a long Nsight Systems export is read: SQLite is asked for its rows alone, so that no others are ever held."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from flopwise.trace.columns import Ints
from flopwise.trace.nsys_file import MISSING, SHORTEST_ROW, Export, integer_sql, quoted
from flopwise.trace.window import GPU_ROWS, MOST_ROWS, Window, middle, step_begins

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_ON_GPU = (KERNELS, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
_ON_HOST = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER", "NVTX_EVENTS")
_SAMPLES = 2000  # rows that are looked at, of a table
_LATEST = 1 << 61


def cut_export(export: Export) -> tuple[Export, int]:
    """The export, of a long one only its middle, and from when to when it is."""
    weights = {base: rows_of(export, base) * (GPU_ROWS if base in _ON_GPU else 1) for base in (*_ON_GPU, *_ON_HOST)}
    total = sum(weights.values())
    if total <= MOST_ROWS:
        return export, 0
    sampled = [(starts, weight) for base, weight in weights.items() if len(starts := _starts(export, base))]
    if not sampled:
        return export, 0
    whole_ns = max(int(starts.max()) for starts, _ in sampled) - min(int(starts.min()) for starts, _ in sampled)
    window = middle([(starts, weight / len(starts)) for starts, weight in sampled], MOST_ROWS / total)
    return replace(export, window=window), whole_ns


def rows_of(export: Export, base: str) -> int:
    """About how many rows the table has: their numbers have no gaps, and the file has room for no more."""
    table = export.table(base)
    first, last = export.rowids(table) if table else (0, -1)
    return min(last - first + 1, export.file.stat().st_size // SHORTEST_ROW)


def _starts(export: Export, base: str) -> Ints:
    """When some of its rows begin, evenly spread."""
    table = export.table(base)
    start = export.column(table, "start")
    if not start:
        return np.empty(0, np.int64)
    first, last = export.rowids(table)
    sql = f"SELECT {integer_sql(start)} FROM {quoted(table)} WHERE rowid >= ? LIMIT 1"
    places = np.unique(np.linspace(first, last, min(_SAMPLES, max(last - first, 0) + 1)).astype(np.int64))
    found = (export.db.execute(sql, (place,)).fetchone() for place in places.tolist())
    starts = [row[0] for row in found if row is not None and row[0] is not None and abs(row[0]) < _LATEST]
    return np.array(starts, dtype=np.int64)


def in_steps(window: Window, ranges: pl.DataFrame, names: Sequence[str]) -> Window:
    """The window, but beginning and ending with steps where ranges mark them."""
    rows = {column: ranges[column].to_numpy() for column in ("start_ns", "name")}
    return window.in_steps(step_begins([rows], names))


def in_window(table: pl.DataFrame, window: Window) -> pl.DataFrame:
    """Spans of the window; those around all of it as far as they are in it. What has no end keeps none."""
    start, end = pl.col("start_ns"), pl.col("end_ns")
    around = (start < window.low_ns) & (end >= window.high_ns)
    table = table.filter(around | start.is_between(window.low_ns, window.high_ns, closed="left"))
    return table.with_columns(
        start_ns=pl.max_horizontal(start, pl.lit(window.low_ns)),
        end_ns=pl.when(around & (end != MISSING)).then(pl.lit(window.high_ns)).otherwise(end),
    )


def launched_in(table: pl.DataFrame, calls: pl.DataFrame, window: Window) -> pl.DataFrame:
    """GPU work of the window: what begins in it, and what its calls launched."""
    start, correlation = (table[name].to_numpy() for name in ("start_ns", "correlation"))
    return table.filter(pl.Series(window.has_work(start, correlation, calls["correlation"].to_numpy())))
