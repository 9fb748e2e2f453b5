"""One operation in several implementations, side by side: a row each, with its ratio to the first and to the best."""

from typing import Any

from flopwise import units
from flopwise.analysis.clocks import summarise
from flopwise.predict.op_bytes import op_bytes
from flopwise.records.run import OK, Point
from flopwise.render.table import Column, Table, View
from flopwise.spec.gpu import find_gpu
from flopwise.spec.workload import OpSpec
from flopwise.store import StoredRun


def implementations_view(run: StoredRun, document: dict[str, Any]) -> View:
    """The table, and the run's document with its rows."""
    rows = [_row(point) for point in run.points]
    times = [row["time_ns"] for row in rows if row["time_ns"]]
    first = rows[0]["time_ns"] if rows else None
    for row in rows:
        row["to_first"] = row["time_ns"] / first if row["time_ns"] and first else None
        row["to_best"] = row["time_ns"] / min(times) if row["time_ns"] else None
    columns = (
        Column("impl", "impl", right=False),
        Column("time_ns", "GPU ms" if any(row["on_gpu"] for row in rows) else "wall ms", units.milliseconds),
        Column("to_first", "of the first", _times),
        Column("to_best", "of the best", _times),
        Column("bytes_per_s", "GB/s", lambda rate: f"{rate / 1e9:.0f}"),
        Column("bandwidth_share", "of the bandwidth", lambda share: units.percent(share, 0)),
        Column("status", "status", right=False, longest=160),
    )
    used = tuple(c for c in columns if any(row.get(c.key) is not None for row in rows))
    workload = run.points[0].trial.workload if run.points else None
    label = workload.label() if workload is not None else run.header.name
    if workload is not None and isinstance(workload.subject, OpSpec):
        label = label.replace(f" {workload.subject.impl}", "", 1)
    notes = ["measured: median; each result was compared with a reference in fp32 first"]
    if any(row["bytes_per_s"] for row in rows):
        notes.append("GB/s: each input once and each result once, over the time; the bandwidth is the datasheet's")
    notes += dict.fromkeys(point.ran.kernels for point in run.points if point.ran and point.ran.kernels)
    table = Table(title=label, columns=used, rows=tuple(rows), notes=(*notes, f"kept in {run.path}"))
    return [table], document | {"implementations": rows}


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _row(point: Point) -> dict[str, Any]:
    subject, found = point.trial.workload.subject, summarise(point)
    gpu = point.environment.gpu if point.environment else None
    clock = (found[0].gpu or found[0].wall) if found else None
    time_ns = clock.median if clock is not None and point.status == OK else None
    moved = op_bytes(point.trial.workload)
    rate = moved / time_ns * 1e9 if moved and time_ns else None
    known = find_gpu(gpu.name) if gpu is not None else None
    peak = known.bandwidth_bytes_s if known is not None else None
    return {
        "impl": subject.impl if isinstance(subject, OpSpec) else "",
        "time_ns": time_ns,
        "on_gpu": bool(found and found[0].gpu is not None),
        "bytes_per_s": rate,
        "bandwidth_share": rate / peak if rate and peak else None,
        "status": None if point.status == OK else f"{point.status}: {point.reason}",
    }
