"""One operation in several implementations: a row each, with its ratio to the first and to the best."""

from typing import Any

from flopwise.analysis.clocks import summarise
from flopwise.predict.op_bytes import op_bytes
from flopwise.records.run import OK, Point
from flopwise.records.table import SENTENCE, Column, Table
from flopwise.render.table import View
from flopwise.spec.gpu import find_gpu
from flopwise.spec.workload import OpSpec
from flopwise.store import StoredRun


def implementations_view(run: StoredRun, document: dict[str, Any]) -> View:
    """The table, and the run's document with its rows."""
    rows = [_row(point) for point in run.points]
    times = [row["time_ns"] for row in rows if row["time_ns"]]
    for row in rows:
        compared = {"to_first": rows[0]["time_ns"], "to_best": min(times, default=None)}
        row |= {key: row["time_ns"] / ns if row["time_ns"] and ns else None for key, ns in compared.items()}
    columns = (
        Column("impl", importance=1),
        Column("time_ns", "GPU" if any(row["on_gpu"] for row in rows) else "wall", "ms"),
        Column("to_first", "of the first", "times"),
        Column("to_best", "of the best", "times"),
        Column("bytes_per_s", "bandwidth"),
        Column("bandwidth_share", "of the datasheet's", "percent"),
        Column("status", unit=SENTENCE, importance=1),
    )
    notes = ["measured: median; each result was compared with a reference in fp32 first"]
    if any(row["bytes_per_s"] for row in rows):
        notes.append("bandwidth: each input read once and each result written once, over the time")
    notes += dict.fromkeys(point.ran.kernels for point in run.points if point.ran and point.ran.kernels)
    table = Table("implementations", _title(run), columns, tuple(rows), (*notes, f"stored in {run.path}"))
    return View([table], document | {"implementations": rows})


def _title(run: StoredRun) -> str:
    if not run.points:
        return run.header.name
    workload = run.points[0].trial.workload
    own = workload.subject.impl if isinstance(workload.subject, OpSpec) else ""
    return workload.label().replace(f" {own}", "", 1) if own else workload.label()


def _row(point: Point) -> dict[str, Any]:
    subject, summaries = point.trial.workload.subject, summarise(point)
    step = summaries[0] if summaries else None
    time_ns = (step.gpu or step.wall).median if step and point.status == OK else None
    moved = op_bytes(point.trial.workload)
    rate = moved / time_ns * 1e9 if moved and time_ns else None
    gpu = find_gpu(point.environment.gpu.name) if point.environment and point.environment.gpu else None
    peak = gpu.bandwidth_bytes_s if gpu is not None else None
    return {
        "impl": subject.impl if isinstance(subject, OpSpec) else "",
        "time_ns": time_ns,
        "on_gpu": step is not None and step.gpu is not None,
        "bytes_per_s": rate,
        "bandwidth_share": rate / peak if rate and peak else None,
        "status": None if point.status == OK else f"{point.status}: {point.reason}",
    }
