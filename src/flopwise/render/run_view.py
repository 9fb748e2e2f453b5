"""What a user is shown of a run: a table per point or a row per point for people, a document for programs."""

from collections.abc import Sequence
from typing import Any

from flopwise import units
from flopwise.analysis.clocks import PhaseSummary, compile_ns, summarise, tokens_per_second
from flopwise.records.run import OK, STEP, PhaseMemory, Point
from flopwise.render.axes import Axes, axes_of
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.render.visible import LONGEST_LINE
from flopwise.statistics import FEWEST, Estimate
from flopwise.store import StoredRun

_WALL = Column("wall_ns", "wall ms", units.milliseconds)
_SPREAD = Column("wall_half_width", "±", units.percent)
_GPU = Column("gpu_ns", "GPU ms", lambda ns: ns if isinstance(ns, str) else units.milliseconds(ns))
_LAUNCH = Column("launch_ns", "launch ms", units.milliseconds)
_IDLE = Column("gpu_idle_share", "GPU idle", lambda share: units.percent(share, 0))
_PEAK = Column("peak_bytes", "peak memory", units.size)
_SAMPLES = Column("samples", "n")


def run_view(run: StoredRun) -> View:
    """One point in full, or one row per point."""
    tables = (
        [point_table(point) for point in run.points]
        if len(run.points) <= 2
        else [sweep_table(run.points, run.header.name)]
    )
    content = document(
        "run",
        run={
            "id": run.header.id,
            "kind": run.header.kind,
            "name": run.header.name,
            "path": str(run.path),
            "complete": run.complete,
        },
        points=[point_document(p) for p in run.points],
    )
    kept = (
        (f"kept in {run.path}",)
        if run.complete
        else (f"kept in {run.path}; {len(run.missing())} of {len(run.header.trials)} points are missing",)
    )
    last = tables[-1] if tables else Table(title="no points yet", columns=(), rows=())
    tables = [
        *tables[:-1],
        Table(title=last.title, columns=last.columns, rows=last.rows, notes=(*last.notes, *run.warnings, *kept)),
    ]
    return tables, content


def point_table(point: Point) -> Table:
    """Every phase of one point with its three clocks."""
    where = (
        point.environment.gpu.name
        if point.environment and point.environment.gpu
        else point.ran.device
        if point.ran
        else point.trial.device
    )
    title = f"{point.trial.workload.label()} on {where}"
    summaries = summarise(point)
    if not summaries and point.memory:
        return _memory_table(point, title)
    if not summaries:
        return Table(
            title=title,
            columns=(
                Column("status", "status", right=False),
                Column("reason", "reason", right=False, longest=LONGEST_LINE),
            ),
            rows=({"status": point.status, "reason": point.reason},),
        )
    memory = {m.phase: m for m in point.memory}
    rows = tuple(_phase_row(s, memory) for s in summaries)
    columns: tuple[Column, ...] = (Column("phase", "phase", right=False), _WALL, _SPREAD)
    if summaries[0].gpu is not None:
        columns += (_GPU, _LAUNCH, _IDLE, _PEAK)
    return Table(title=title, columns=(*columns, _SAMPLES), rows=rows, notes=tuple(_notes(point, summaries)))


def _memory_table(point: Point, title: str) -> Table:
    """A point of `memory`: nothing was timed."""
    sizes = (("start_bytes", "at its start"), ("peak_bytes", "peak memory"), ("end_bytes", "at its end"))
    columns = (
        Column("phase", "phase", right=False),
        *(Column(key, name, units.size) for key, name in sizes),
        Column("reserved_bytes", "reserved", units.size),
        Column("unused_bytes", "unused of it", units.size),
    )
    rows = tuple(
        {name: getattr(m, name) for name in m.__struct_fields__} | {"unused_bytes": m.reserved_bytes - m.peak_bytes}
        for m in point.memory
    )
    return Table(title=title, columns=columns, rows=rows, notes=(f"snapshot: memory/{point.memory_file}",))


def _phase_row(s: PhaseSummary, memory: dict[str, PhaseMemory]) -> dict[str, Any]:
    row = {"phase": s.phase} | _clock_cells(s)
    if s.phase in memory:
        row["peak_bytes"] = memory[s.phase].peak_bytes
    elif s.phase == STEP and memory:
        row["peak_bytes"] = max(m.peak_bytes for m in memory.values())
    return row


def _clock_cells(s: PhaseSummary) -> dict[str, Any]:
    cells: dict[str, Any] = {"wall_ns": s.wall.median, "wall_half_width": _half_width(s.wall), "samples": s.wall.n}
    if s.gpu is not None and s.launch is not None:
        cells |= {
            "gpu_ns": s.gpu.median if s.gpu_exact else f"≤ {units.milliseconds(s.gpu.median)}",
            "launch_ns": s.launch.median,
        }
        cells["gpu_idle_share"] = s.gpu_idle_share if s.gpu_exact else None
    return cells


def _half_width(e: Estimate) -> float | None:
    """Of the 95 % interval; nothing where there are too few samples for one."""
    if e.n < FEWEST or e.low is None or e.high is None or not e.median:
        return None
    return (e.high - e.low) / 2 / e.median


def _notes(point: Point, summaries: Sequence[PhaseSummary]) -> list[str]:
    """What a reader must know to trust the numbers."""
    step, notes = summaries[0], []
    if step.bound == "launch" and step.gpu is not None and step.launch is not None:
        notes.append(
            f"launch-bound: the host needs {units.duration(step.launch.median)} to launch what the GPU does in "
            f"{units.duration(step.gpu.median)}{_fewer_launches(point)}"
        )
    if any(s.gpu is not None and not s.gpu_exact for s in summaries):
        notes.append(
            "≤: the GPU could not be held until all was queued, so its time may include waiting for the host; "
            "with CUDA_SCALE_LAUNCH_QUEUES=4x the driver queues four times as many launches"
        )
    notes.append(_how(point))
    if (compiled := compile_ns(point)) is not None:
        cached = (
            f", {point.ran.inductor_cache_hits} graphs from the cache"
            if point.ran and point.ran.inductor_cache_hits
            else ""
        )
        notes.append(f"compilation: {units.duration(compiled)} in the first step{cached}")
    if point.trial.workload.recipe.graph == "on":
        notes.append(
            f"set-up: {units.duration(point.setup_ns)}, the graph's warm-up (with compilation, if any) and capture included"
        )
    if (rate := tokens_per_second(point)) is not None:
        notes.append(f"{units.count(rate)} tokens/s")
    if point.ran is not None:
        notes.append(_what(point))
    if point.telemetry is not None and point.telemetry.throttle:
        notes.append(f"the GPU was slowed by: {', '.join(point.telemetry.throttle)}")
    if step.wall.drift:
        notes.append(
            f"the step's time drifted by {units.percent(step.wall.drift)} during sampling: the machine was not quiet"
        )
    if point.trace_file:
        notes.append(
            f"trace: traces/{point.trace_file}; a traced step took {units.duration(point.traced_step_ns)}, "
            f"{_beside_untraced(point.traced_step_ns / step.wall.median)}"
        )
    if point.status != OK:
        notes.append(f"{point.status}: {point.reason}")
    return notes


def _beside_untraced(ratio: float) -> str:
    """
    >>> [_beside_untraced(ratio) for ratio in (1.25, 0.97, 1.001)]
    ['25 % more than untraced', '3 % less than untraced', 'as long as untraced']
    """
    if abs(ratio - 1) < 0.005:
        return "as long as untraced"
    return f"{units.percent(abs(ratio - 1), 0)} {'more' if ratio > 1 else 'less'} than untraced"


def _fewer_launches(point: Point) -> str:
    recipe = point.trial.workload.recipe
    levers = [
        f"--{name} {on}" for name, on in (("graph", "on"), ("compile", "default")) if getattr(recipe, name) == "off"
    ]
    return f"; fewer launches help ({', '.join(levers)})" if levers else ""


def _how(point: Point) -> str:
    warm = {"steady": "until steady", "forced": "as asked", "budget": "not steady when its budget ended"}.get(
        point.warmup_rule, ""
    )
    ended = {
        "precise": "precise to ±1 %",
        "samples": "as many as asked",
        "budget": "the budget ended",
        "timeout": "timed out",
        "interrupted": "interrupted",
    }.get(point.stopped, "")
    steps = f"warm-up {len(point.warmup_ns)} steps ({warm})"
    return f"measured: median of all samples, 95 % interval; {steps}; sampling ended: {ended}"


def _what(point: Point) -> str:
    ran = point.ran
    assert ran is not None
    words = [
        f"{units.count(ran.parameters)} parameters" if ran.parameters else "",
        f"weights {ran.weights}" + (f", matmuls {ran.compute}" if ran.compute else "") if ran.weights else "",
    ]
    words += [
        f"fp32 matmuls: {ran.fp32_matmul}" if ran.fp32_matmul else "",
        f"attention {ran.attention}" if ran.attention else "",
        ran.optimizer,
        ran.kernels,
        f"{ran.checkpointed} blocks recomputed" if ran.checkpointed else "",
    ]
    return "what ran: " + "; ".join(word for word in words if word)


def sweep_table(points: Sequence[Point], name: str) -> Table:
    """One row per point; only what differs between the points has a column, the rest is in the title."""
    axes: Axes = axes_of(points)
    rows, phases = [], list(dict.fromkeys(t.phase for p in points for t in p.phases[1:]))
    for point, varying in zip(points, axes.varying, strict=True):
        row: dict[str, Any] = dict(varying) | {
            "status": point.status if point.status == OK else f"{point.status}: {point.reason}"[:120]
        }
        if summaries := summarise(point):
            row |= _clock_cells(summaries[0]) | {f"{s.phase}_wall_ns": s.wall.median for s in summaries[1:]}
            row |= {
                "tokens_per_s": tokens_per_second(point),
                "mean_ns": summaries[0].wall.mean,
                "std_ns": summaries[0].wall.std,
                "bound": summaries[0].bound or None,
                "compile_ns": compile_ns(point),
            }
        if point.memory:
            row["peak_bytes"] = max(m.peak_bytes for m in point.memory)
            row["before_backward_bytes"] = next((m.start_bytes for m in point.memory if m.phase == "backward"), None)
        rows.append(row)
    columns = [Column(axis, axis, right=False) for axis in axes.names]
    columns += [_WALL, _SPREAD, _GPU, _LAUNCH, Column("bound", "bound", right=False)]
    columns += [Column(f"{phase}_wall_ns", f"{phase} ms", units.milliseconds) for phase in phases]
    columns += [
        _PEAK,
        Column("before_backward_bytes", "before backward", units.size),
        Column("compile_ns", "compile", units.duration),
    ]
    columns += [Column("tokens_per_s", "tokens/s", units.count)]
    if "warmup" in axes.names:  # what a mean makes of a cold first sample is the point there; elsewhere it misleads
        columns += [Column("mean_ns", "mean ms", units.milliseconds), Column("std_ns", "std ms", units.milliseconds)]
    columns += [_SAMPLES]
    if any(p.status != OK for p in points):
        columns.append(Column("status", "status", right=False))
    used = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
    fixed = ", ".join(f"{k}={v}" for k, v in axes.fixed.items())
    return Table(title=f"{name}: {fixed}" if fixed else name, columns=tuple(used), rows=tuple(rows))


def point_document(point: Point) -> dict[str, Any]:
    """A point for programs: summaries, not samples; those are in the run's points.jsonl."""
    return {
        "label": point.trial.workload.label(),
        "key": point.key,
        "group": point.trial.group,
        "workload": point.trial.workload,
        "sampling": point.trial.sampling,
        "device": point.ran.device if point.ran else point.trial.device,
        "status": point.status,
        "reason": point.reason,
        "hint": point.hint,
        "phases": [_phase_document(s) for s in summarise(point)],
        "warmup": {"steps": len(point.warmup_ns), "rule": point.warmup_rule, "wall_ns": point.warmup_ns},
        "stopped": point.stopped,
        "setup_ns": point.setup_ns,
        "compile_ns": compile_ns(point),
        "tokens_per_s": tokens_per_second(point),
        "memory": point.memory,
        "peak_rss_bytes": point.peak_rss_bytes,
        "ran": point.ran,
        "throttle": point.telemetry.throttle if point.telemetry else (),
        "environment": point.environment,
        "trace_file": point.trace_file,
        "traced_step_ns": point.traced_step_ns,
        "memory_file": point.memory_file,
        "paired_with": point.paired_with,
    }


def _phase_document(s: PhaseSummary) -> dict[str, Any]:
    clocks = {"wall": s.wall, "launch": s.launch, "gpu": s.gpu}
    return {
        "phase": s.phase,
        **{name: None if e is None else _estimate_document(e) for name, e in clocks.items()},
        "gpu_exact": s.gpu_exact,
        "gpu_idle_share": s.gpu_idle_share,
        "bound": s.bound,
    }


def _estimate_document(e: Estimate) -> dict[str, Any]:
    return {
        "median_ns": e.median,
        "low_ns": e.low,
        "high_ns": e.high,
        "n": e.n,
        "mean_ns": e.mean,
        "std_ns": e.std,
        "drift": e.drift,
        "method": e.method,
        "obtained": "measured",
    }
