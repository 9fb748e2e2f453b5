"""A run as tables: one point in full, a row per point, or a row per implementation; and as a document for programs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from flopwise import units
from flopwise.analysis.clocks import (
    PhaseSummary,
    StepLevel,
    compile_ns,
    gpu_name,
    phase_levels,
    point_mfu,
    step_level,
    step_walls,
    step_work,
    summarise,
    summarise_all,
    tokens_per_second,
)
from flopwise.analysis.hosts import host, measured_with, several_environments, several_hosts
from flopwise.analysis.loop_notes import doubt, loop_notes
from flopwise.predict.op_bytes import op_bytes
from flopwise.records.run import OK, STEP, PhaseMemory, Point, Ran, Seen
from flopwise.records.table import SENTENCE, AtMost, Column, Table
from flopwise.render.axes import MESSAGE, axes_of
from flopwise.render.exchanges_view import exchange_document, fit_rows, fit_tables, rates, rounded
from flopwise.render.json import document, picked
from flopwise.render.table import View, columns, saying
from flopwise.spec.gpu import find_gpu
from flopwise.spec.operations import OpSpec
from flopwise.statistics import FEWEST, Estimate
from flopwise.store import StoredRun

_CLOCKS = columns(
    "wall_ns [ms] | wall_half_width: ± [share] | gpu_ns: GPU [ms] | launch_ns [ms]", keep="wall_ns gpu_ns"
)
_SAMPLES = Column("samples", "n")
_RATES = "mfu | tokens_per_s: tokens/s"
_BANDWIDTHS = "algorithm_bytes_per_s: algorithm bandwidth | bus_bytes_per_s: bus bandwidth"
_UNTRACED = 0.005  # a traced step that differs by less from the untraced one is as long
_WARMUP = {"steady": "until steady", "forced": "as asked", "budget": "not steady when its budget ended"}
_STOPPED = {
    "precise": "precise to ±1 %",
    "samples": "as many as asked",
    "budget": "the budget ended",
    "timeout": "timed out",
    "interrupted": "interrupted",
    "decided": "the comparison was decided",
    "processes": "as many processes as asked",
}
_RAN = {
    "parameters": "{} parameters",
    "weights": "weights {}",
    "compute": "matmuls {}",
    "fp32_matmul": "fp32 matmuls: {}",
    "attention": "attention {}",
    "optimizer": "{}",
    "backend": "by {}",
    "kernels": "{}",
    "linear": "{}",
    "checkpointed": "{} blocks recomputed",
}
_LEAST_SHARE = 0.005  # of the FLOPs: a dtype that has less is not named
_COMPILED = {"model": "compiled", "blocks": "its blocks compiled", "parts": "parts compiled"}


def run_view(run: StoredRun) -> View:
    """One point in full, or one row per point, and the folder that holds the run."""
    about = picked(run.header, "id kind name") | {"path": str(run.path), "complete": run.complete}
    about |= {"warnings": run.warnings}
    links = {"links": found} if (found := fit_rows(run.points)) else {}
    points = [_point_document(*one) for one in zip(run.points, summarise_all(run.points), strict=True)]
    view = View(run_tables(run), document("run", run=about, points=points, **links))
    return saying(view, run.left_out)


def run_tables(run: StoredRun, place: bool = True) -> list[Table]:
    """The tables alone; `place`: with the folder that holds the run, which a shared page omits."""
    many = len(run.points) > 2
    tables = [sweep_table(run.points, run.header.name)] if many else [point_table(point) for point in run.points]
    tables = tables or [Table("points", "No points yet", (), ())]
    stored = (f"stored in {run.path}{_missing(run)}",) if place else ()
    hosts = tuple(filter(None, (several_hosts(run.points), several_environments(run.points))))
    tables[-1] = replace(tables[-1], notes=(*tables[-1].notes, *hosts, *stored))
    return [*tables, *fit_tables(run.points)]


def _missing(run: StoredRun) -> str:
    missing = run.missing()
    return f"; {len(missing)} of {len(run.header.trials)} points are missing" if missing else ""


def point_table(point: Point) -> Table:
    """Every phase of one point with its three clocks."""
    gpu = point.environment.gpu if point.environment else None
    where = gpu.name if gpu else point.ran.device if point.ran else point.trial.device
    title = f"{point.trial.workload.label()} on {where}"
    summaries = summarise(point)
    if not summaries and point.memory:
        return _memory_table(point, title)
    if not summaries:
        failure = {"status": point.status, "reason": point.reason}
        return Table("point", title, columns("status | reason"), (failure,))
    memory = {m.phase: m for m in point.memory}
    idle = columns("gpu_idle_share: GPU idle [percent] | peak_bytes")
    shown = (Column("phase"), *_CLOCKS, *idle, *_rate_columns((point,), files="mfu tokens_per_s"), _SAMPLES)
    rows = [_phase_row(summary, memory) for summary in summaries]
    rows[0] |= {"mfu": point_mfu(point), "tokens_per_s": tokens_per_second(point)} | rates(point)
    return Table("point", title, shown, tuple(rows), tuple(_notes(point, summaries)))


def _rate_columns(points: Sequence[Point], files: str = "") -> tuple[Column, ...]:
    """A collective has bandwidths; other steps have FLOPs and tokens."""
    return columns(_BANDWIDTHS, keep="bus_bytes_per_s") if any(map(rates, points)) else columns(_RATES, files=files)


def _memory_table(point: Point, title: str) -> Table:
    """A point of `memory`: nothing was timed."""
    sizes = (
        "start_bytes: at its start | peak_bytes | end_bytes: at its end | reserved_bytes | unused_bytes: of that unused"
    )
    rows = tuple(msgspec.structs.asdict(m) | {"unused_bytes": m.reserved_bytes - m.peak_bytes} for m in point.memory)
    notes = (f"snapshot: memory/{point.memory_file}",)
    return Table("point", title, columns(f"phase | {sizes}"), rows, notes)


def _phase_row(s: PhaseSummary, memory: dict[str, PhaseMemory]) -> dict[str, Any]:
    peaks = [memory[s.phase]] if s.phase in memory else memory.values() if s.phase == STEP else ()
    level = StepLevel(
        wall_ns=s.wall.median,
        gpu_ns=s.gpu.median if s.gpu is not None else None,
        launch_ns=s.launch.median if s.launch is not None else None,
        gpu_exact=s.gpu_exact,
        gpu_idle_share=s.gpu_idle_share,
    )
    return (
        {"phase": s.phase} | _clocks(s.wall, level) | {"peak_bytes": max((m.peak_bytes for m in peaks), default=None)}
    )


def _clocks(wall: Estimate, level: StepLevel) -> dict[str, Any]:
    clocks: dict[str, Any] = {"wall_ns": wall.median, "wall_half_width": half_width(wall), "samples": wall.n}
    if level.gpu_ns is not None and level.launch_ns is not None:
        clocks["gpu_ns"] = level.gpu_ns if level.gpu_exact else AtMost(level.gpu_ns)
        clocks["launch_ns"] = level.launch_ns
        clocks["gpu_idle_share"] = level.gpu_idle_share if level.gpu_exact else None
    return clocks


def half_width(e: Estimate) -> float | None:
    """Of the 95 % interval; None where there are too few samples for one."""
    if e.n < FEWEST or e.low is None or e.high is None or not e.median:
        return None
    return (e.high - e.low) / 2 / e.median


def _notes(point: Point, summaries: Sequence[PhaseSummary]) -> list[str]:
    """What a reader must know to trust the numbers."""
    step = summaries[0]
    notes = [
        *(() if rates(point) else (_launch_bound(point, step), _inexact(summaries))),  # ranks cannot be held apart
        _sampling(point),
        _compilation(point),
        _rates(point),
        rounded(point),
        _what_ran(point.ran) if point.ran is not None else "",
        _unwatched(point),
        disturbed(point, step),
        _tracing(point, step),
        *loop_notes(point),
        f"{point.status}: {point.reason}" if point.status != OK else "",
    ]
    return [note for note in notes if note]


def _launch_bound(point: Point, step: PhaseSummary) -> str:
    if step.bound != "launch" or step.gpu is None or step.launch is None:
        return ""
    recipe = point.trial.workload.recipe
    fewer = {"graph": "--graph on", "compile": "--compile default"}
    levers = [option for lever, option in fewer.items() if getattr(recipe, lever) == "off"]
    advice = f"; fewer launches help ({', '.join(levers)})" if levers else ""
    host, gpu = units.duration(step.launch.median), units.duration(step.gpu.median)
    return f"launch-bound: the CPU needs {host} to launch what the GPU does in {gpu}{advice}"


def _inexact(summaries: Sequence[PhaseSummary]) -> str:
    if all(s.gpu is None or s.gpu_exact for s in summaries):
        return ""
    return (
        "≤: the GPU could not be held until all work was queued, so its time may include waiting for the CPU; "
        "CUDA_SCALE_LAUNCH_QUEUES=4x lets the driver queue four times as many launches"
    )


def _sampling(point: Point) -> str:
    warm, ended = _WARMUP.get(point.warmup_rule, ""), _STOPPED.get(point.stopped, "")
    steps = f"warm-up {len(point.warmup_ns)} steps ({warm})"
    times = point.times()
    n = len(times.by_process("wall")) if times else 1
    what = "median of all samples" if n == 1 else f"mean of the medians of {n} processes"
    return f"measured: {what}, 95 % interval; {steps}; sampling ended: {ended}"


def _compilation(point: Point) -> str:
    notes = []
    if (compiled := compile_ns(point)) is not None:
        hits = point.ran.inductor_cache_hits if point.ran else 0
        cached = f", {hits} graphs from the cache" if hits else ""
        notes.append(f"compilation: {units.duration(compiled)} in the first step{cached}")
    if point.trial.workload.recipe.graph == "on":
        setup = units.duration(point.setup_ns)
        notes.append(f"set-up: {setup}, including the graph's capture, its warm-up and any compilation")
    return "; ".join(notes)


def _rates(point: Point) -> str:
    """MFU, of which peak, and tokens per second: as far as they are known."""
    share, rate = point_mfu(point), tokens_per_second(point)
    work = step_work(point.trial.workload, point.ran)
    peak = units.rate(work.peak(gpu_name(point)) or 0.0, "FLOP/s")
    words = [f"MFU {units.percent(share)} of {peak} {work.dtype}"] if share is not None else []
    return "; ".join([*words, *([f"{units.count(rate)} tokens/s"] if rate is not None else [])])


def _what_ran(ran: Ran) -> str:
    values = {key: getattr(ran, key) for key in _RAN} | {
        "parameters": units.count(ran.parameters) if ran.parameters else ""
    }
    if (seen := ran.seen) is not None and seen.flops:  # which says what ran in fp32, and whether as TF32
        values |= {"compute": _dtypes(seen), "fp32_matmul": ""}
    words = [text.format(values[key]) for key, text in _RAN.items() if values[key]]
    return "what ran: " + "; ".join([*words, *(_also_seen(seen) if seen is not None else [])])


def _dtypes(seen: Seen) -> str:
    """
    >>> _dtypes(Seen(flops={"bf16": 75, "fp32": 25}, autocast="bf16")), _dtypes(Seen(flops={"tf32": 1}))
    ('75 % bf16, 25 % fp32 (autocast)', 'tf32')
    """
    whole = sum(seen.flops.values())
    shares = {dtype: flops / whole for dtype, flops in seen.flops.items() if flops >= _LEAST_SHARE * whole}
    words = [f"{units.percent(share, 0)} {dtype}" for dtype, share in shares.items()] if len(shares) > 1 else [*shares]
    return ", ".join(words) + (" (autocast)" if seen.autocast else "")


def _also_seen(seen: Seen) -> list[str]:
    """What a step does beyond dtypes, attention and optimizer."""
    work = [
        units.rate(seen.useful_flops, "FLOP") if seen.useful_flops else "",
        f"{seen.tokens:,} tokens" if seen.tokens else "",
    ]
    done = " and ".join(filter(None, work))
    words = [
        _COMPILED.get(seen.compiled, ""),
        f"{seen.replays} CUDA graphs replayed, whose work is not seen" if seen.replays else "",
        f"gradients of {seen.backwards} backward passes summed" if seen.backwards > seen.updates > 0 else "",
        "gradients clipped" if seen.clips else "",
        f"{done} a step" if done else "",
    ]
    return [word for word in words if word]


def _unwatched(point: Point) -> str:
    seen = point.ran.seen if point.ran is not None else None
    return f"not known what the step does: it fails when run op by op ({seen.problem})" if seen and seen.problem else ""


def disturbed(point: Point, step: PhaseSummary) -> str:
    notes = []
    if point.telemetry is not None and point.telemetry.throttle:
        notes.append(f"the GPU was slowed by: {', '.join(point.telemetry.throttle)}")
    if step.wall.drift:
        drift = units.percent(step.wall.drift)
        notes.append(f"the step's time drifted by {drift} during sampling: the machine was not quiet")
    return "; ".join(notes)


def _tracing(point: Point, step: PhaseSummary) -> str:
    if not point.trace_file:
        return ""
    traced = units.duration(point.traced_step_ns)
    longer = _compared_with_untraced(point.traced_step_ns / step.wall.median)
    return f"trace: traces/{point.trace_file}; a traced step took {traced}, {longer}"


def _compared_with_untraced(ratio: float) -> str:
    """
    >>> [_compared_with_untraced(ratio) for ratio in (1.25, 0.97, 1.001)]
    ['25 % more than untraced', '3 % less than untraced', 'as long as untraced']
    """
    if abs(ratio - 1) < _UNTRACED:
        return "as long as untraced"
    return f"{units.percent(abs(ratio - 1), 0)} {'more' if ratio > 1 else 'less'} than untraced"


def sweep_table(points: Sequence[Point], name: str) -> Table:
    """One row per point; only what differs between the points has a column, the rest is in the title."""
    axes = axes_of(points)
    phases = dict.fromkeys(times.phase for point in points for times in point.phases[1:])
    failed = any(point.status != OK or doubt(point) for point in points)
    # A mean is shown where warm-up varies: what it makes of a cold first sample is the point there.
    means = columns("mean_ns [ms] | std_ns [ms]") if "warmup" in axes.names else ()
    shown = (
        *(Column(axis, axis, "GB" if axis == MESSAGE else "", importance=1) for axis in axes.names),
        *(*_CLOCKS, Column("bound")),
        *(Column(f"{phase}_wall_ns", phase, "ms") for phase in phases),
        *columns("peak_bytes | before_backward_bytes | compile_ns"),
        *_rate_columns(points),
        *means,
        _SAMPLES,
        *((Column("host"),) if several_hosts(points) else ()),
        *((Column("environment"),) if several_environments(points) else ()),
        *((Column("status", unit=SENTENCE, importance=2),) if failed else ()),
    )
    each = zip(points, axes.varying, step_walls(points), strict=True)
    rows = tuple(dict(varying) | _sweep_row(point, wall) for point, varying, wall in each)
    fixed = ", ".join(f"{key}={value}" for key, value in axes.fixed.items())
    return Table("points", f"{name}: {fixed}" if fixed else name, shown, rows)


def _sweep_row(point: Point, wall: Estimate | None) -> dict[str, Any]:
    status = ", ".join(filter(None, (point.status, doubt(point))))
    status = status if point.status == OK else f"{point.status}: {point.reason}"
    row: dict[str, Any] = {"status": status, "host": host(point), "environment": measured_with(point)}
    if wall is not None and (step := step_level(point)) is not None:
        row |= _clocks(wall, step) | {f"{phase}_wall_ns": ns for phase, ns in phase_levels(point).items()}
        row |= {"mean_ns": wall.mean, "std_ns": wall.std, "bound": step.bound or None}
        row |= {"mfu": point_mfu(point), "tokens_per_s": tokens_per_second(point), "compile_ns": compile_ns(point)}
        row |= rates(point)
    if point.memory:
        before = next((m.start_bytes for m in point.memory if m.phase == "backward"), None)
        row |= {"peak_bytes": max(m.peak_bytes for m in point.memory), "before_backward_bytes": before}
    return row


_POINT = (
    "key status reason hint stopped setup_ns memory peak_rss_bytes ran environment busy_cores trace_file "
    "traced_step_ns memory_file paired_with together"
)


def _point_document(point: Point, phases: Sequence[PhaseSummary]) -> dict[str, Any]:
    """A point for programs: summaries, not samples; those are in the run's points.jsonl."""
    trial = point.trial
    return picked(point, _POINT) | {
        "label": trial.workload.label(),
        "group": trial.group,
        "processes": [len(one) for one in times.by_process("wall")] if (times := point.times()) else [],
        "workload": trial.workload,
        "sampling": trial.sampling,
        "device": point.ran.device if point.ran else trial.device,
        "phases": [_phase_document(summary) for summary in phases],
        "warmup": {"steps": len(point.warmup_ns), "rule": point.warmup_rule, "wall_ns": point.warmup_ns},
        "compile_ns": compile_ns(point),
        "tokens_per_s": tokens_per_second(point),
        "mfu": point_mfu(point),
        "flops": step_work(trial.workload, point.ran).flops or None,
        "exchange": exchange_document(point),
        "throttle": point.telemetry.throttle if point.telemetry else (),
    }


def _phase_document(s: PhaseSummary) -> dict[str, Any]:
    clocks = {"wall": s.wall, "launch": s.launch, "gpu": s.gpu}
    return msgspec.structs.asdict(s) | {name: e and _estimate_document(e) for name, e in clocks.items()}


def _estimate_document(e: Estimate) -> dict[str, Any]:
    return {  # written out: a run of thousands of points has a dozen each
        "median_ns": e.median,
        "low_ns": e.low,
        "high_ns": e.high,
        "mean_ns": e.mean,
        "std_ns": e.std,
        "n": e.n,
        "drift": e.drift,
        "method": e.method,
        "obtained": "measured",
    }


def implementations_view(run: StoredRun, document: dict[str, Any]) -> View:
    """The table, and the run's document with its rows."""
    rows = [_implementation(point) for point in run.points]
    times = [row["time_ns"] for row in rows if row["time_ns"]]
    for row in rows:
        compared = {"to_first": rows[0]["time_ns"], "to_best": min(times, default=None)}
        row |= {key: row["time_ns"] / ns if row["time_ns"] and ns else None for key, ns in compared.items()}
    clock = "GPU" if any(row["on_gpu"] for row in rows) else "wall"
    shown = columns(
        f"impl | time_ns: {clock} [ms] | to_first: of first [times] | to_best: of best [times] | bytes_per_s: bandwidth | "
        "bandwidth_share: of the datasheet's [percent] | status [sentence]",
        keep="status",
    )
    notes = ["measured: median; each result was compared with a reference in fp32 first"]
    if any(row["bytes_per_s"] for row in rows):
        notes.append("bandwidth: each input read once and each result written once, over the time")
    notes += dict.fromkeys(point.ran.kernels for point in run.points if point.ran and point.ran.kernels)
    table = Table("implementations", _operation(run), shown, tuple(rows), (*notes, f"stored in {run.path}"))
    return View([table], document | {"implementations": rows})


def _operation(run: StoredRun) -> str:
    if not run.points:
        return run.header.name
    workload = run.points[0].trial.workload
    own = workload.subject.impl if isinstance(workload.subject, OpSpec) else ""
    return workload.label().replace(f" {own}", "", 1) if own else workload.label()


def _implementation(point: Point) -> dict[str, Any]:
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
