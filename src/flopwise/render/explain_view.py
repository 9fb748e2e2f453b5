"""An explained trace as tables: one in full, several side by side, or one compared with another."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flopwise import units
from flopwise.analysis.explanation import Explanation, Kernel, Share, changes, idle_share
from flopwise.analysis.steps import WHOLE_TRACE
from flopwise.analysis.together import device_names, together
from flopwise.analysis.verdict import in_two_words
from flopwise.records.run import STEP
from flopwise.records.table import Column, Table
from flopwise.render.findings_view import findings_view
from flopwise.render.json import document, picked
from flopwise.render.limit_view import LIMIT, limit_table
from flopwise.render.names import short_paths, unique_names
from flopwise.render.screen import in_a_line
from flopwise.render.steps_view import (
    BLAME,
    ITERATIONS,
    STEPS,
    TRANSFERS,
    blame_table,
    iterations_table,
    steps_table,
    transfers_table,
)
from flopwise.render.table import View, columns, grouped
from flopwise.render.waterfall_view import waterfall_table
from flopwise.trace.phases import PHASES

TOP = 12  # modules, kernels; of changes, the largest savings and the largest losses
SUMMARY, PHASE_TABLE, MODULES, KERNELS, OPERATORS = "summary", "phases", "modules", "kernels", "operators"
IDLE = "idle"
_GROUPS = {
    "What to change": "findings finding-*",
    "Where the time goes": f"devices waterfall {LIMIT} {PHASE_TABLE} {MODULES} {KERNELS} {OPERATORS} {IDLE} {ITERATIONS} "
    f"{BLAME} {TRANSFERS} {STEPS}",
}
_CLOCKS = (
    "untraced_ns: step, untraced [ms] | untraced_idle_share: GPU idle | window_ns: step, traced [ms] | "
    "idle_share: GPU idle, traced | busy_ns: GPU busy [ms]"
)
_TIMES, _COUNTS = "before_ns after_ns saved_ns", "before_count after_count"
_IN_MS = "before_ns [ms] | after_ns [ms] | saved_ns [ms]"
_TOTALS = {"step": "step", "gpu_busy": "GPU busy", "gpu_idle": "GPU idle", "gpu_time": "GPU time, added up"}
_SLOWED = (
    "this is the traced step: a profiler slows the CPU, and the step alone may wait less; "
    "flopwise profile measures both, --timings RUN gives the time of a run without a profiler"
)


def explanation_view(e: Explanation) -> View:
    """The findings, the waterfall, GPU time by phase, module, kernel and operator, idle time by cause."""
    tables = [_summary(e)]
    details: list[Table] = []
    content = document("explain", traces=[e])
    if e.findings is not None:
        (overview, *details), found = findings_view(e.findings, e.step_ns)
        tables.append(overview)
        content["findings"] = found["findings"]
    if e.devices:
        tables.append(_overview(e.devices, device_names(e.devices), "device"))
    if e.waterfall is not None:
        tables.append(waterfall_table(e.waterfall))
        tables += [limit_table(e.waterfall.limit)] if e.waterfall.limit is not None else []
    tables += [_phases(e), _modules(e), kernels_table(e, TOP), _operators(e), _idle(e)]
    tables += [made for made in (iterations_table(e), blame_table(e), transfers_table(e), steps_table(e)) if made.rows]
    return View(grouped([*tables, *details], _GROUPS), content)


def explanations_view(explanations: Sequence[Explanation]) -> View:
    """One row per trace."""
    content = document("explain", traces=list(explanations))
    return View([_overview(explanations, _names(explanations))], content)


def _names(explanations: Sequence[Explanation]) -> list[str]:
    return short_paths([e.path for e in explanations])


def traced_idle_share(e: Explanation) -> float:
    """How long the GPU waits, with the profiler."""
    return e.idle.total_ns / max(e.window_ns * e.steady_steps, 1)


def _summary(e: Explanation) -> Table:
    where = f" on {e.gpu}" if e.gpu else ""
    covered = ", ".join(f"{name} {units.percent(share)}" for name, share in e.coverage.items())
    notes = [
        e.verdict,
        in_a_line(e.reach) if e.reach is not None else "",
        _SLOWED if e.launch_bound and e.untraced_idle is None else "",
        f"measured: {_steps(e)}; times are of one step",
        f"share of the GPU time with a known {covered}",
        _precisions(e),
        _untraced(e),
        _overlap(e),
        _softmax(e),
        *e.notes,
    ]
    row = picked(e, "window_ns busy_ns gpu_ns launches") | _untraced_columns(e) | {"idle_share": traced_idle_share(e)}
    shown = columns(f"{_CLOCKS} | gpu_ns: kernels added up [ms] | launches [count]")
    title = f"{_names([e])[0]}: {e.source} trace{where}"
    return Table(SUMMARY, title, shown, (row,), tuple(note for note in notes if note))


def _precisions(e: Explanation) -> str:
    """What the matmuls compute in, by their names."""
    named = [f"{what} {units.percent(share, 0)}" for what, share in e.matmul_precision.items()]
    return f"matmuls by precision: {', '.join(named)}" if named else ""


def _steps(e: Explanation) -> str:
    """How many steps there are, how they were found, and how many of them are steady.

    >>> from types import SimpleNamespace
    >>> cases = ((1, 1, WHOLE_TRACE), (3, 2, "ranges"))
    >>> [_steps(SimpleNamespace(steps=n, steady_steps=k, steps_found_by=how)) for n, k, how in cases]
    ['1 step, the whole trace', '3 steps, found by ranges, 2 of them steady']
    """
    number = "1 step" if e.steps == 1 else f"{e.steps} steps"
    steady = f", {e.steady_steps} of them steady" if e.steady_steps < e.steps else ""
    return (
        f"{number}, {'the whole trace' if e.steps_found_by == WHOLE_TRACE else f'found by {e.steps_found_by}'}{steady}"
    )


def _untraced(e: Explanation) -> str:
    """The step without a profiler, and which run timed it, or what it may be."""
    step = e.untraced_step
    if STEP in e.host_ns:
        timed = f" ({e.timings})" if e.timings else ""
        return f"untraced, the step takes {units.duration(e.host_ns[STEP])} of wall time{timed}"
    if step is None:
        return ""
    low, high = units.duration(step.low_ns), units.duration(step.high_ns)
    return f"untraced, the step takes about {units.duration(step.ns)}, an estimate: {low} to {high}"


def _overlap(e: Explanation) -> str:
    """Why kernels added up can be more than the time the GPU was busy."""
    if not e.overlap_ns:
        return ""
    both, one = units.duration(e.overlap_ns), units.duration(e.stream_overlap_ns)
    return f"overlap: {both} of the GPU time ran at the same time as other work, {one} of it on the same stream"


def _softmax(e: Explanation) -> str:
    """Question (e): softmax does a small share of attention's FLOPs and takes a large share of its time."""
    parts = e.attention
    if parts.softmax_time_share is None:
        return ""
    time = units.percent(parts.softmax_time_share, 0)
    found = f"attention, forward: softmax takes {time} of the time of softmax and its matmuls"
    if parts.softmax_flops is None or parts.matmul_flops is None or parts.rate_ratio is None:
        none = parts.softmax_flops is None and parts.matmul_flops is None
        return (
            f"{found}; their FLOPs are unknown: {'no shapes in this trace' if none else 'not every op has its shapes'}"
        )
    softmax = units.rate(parts.softmax_flops / parts.softmax_ns * 1e9, "FLOP/s")
    matmul = units.rate(parts.matmul_flops / parts.matmul_ns * 1e9, "FLOP/s")
    share = units.percent(parts.softmax_flops_share or 0.0)
    return f"{found} and does {share} of their FLOPs: {softmax} compared with {matmul}, 1 to {parts.rate_ratio:.0f}"


def _phases(e: Explanation) -> Table:
    kinds = [share.name for share in e.classes]
    rows: list[dict[str, Any]] = [
        {"phase": p.name}
        | picked(p, "gpu_ns share count")
        | {f"{kind}_ns": e.phase_classes.get(p.name, {}).get(kind) for kind in kinds}
        for p in e.phases
    ]
    total = {"phase": "all", "share": 1.0} | {key: sum(row[key] or 0 for row in rows) for key in ("gpu_ns", "count")}
    total |= {f"{share.name}_ns": share.gpu_ns for share in e.classes}
    shown = (*_shares("phase"), *(Column(f"{kind}_ns", kind, "ms") for kind in kinds))
    return Table(PHASE_TABLE, "GPU time by phase and class", shown, (*rows, total), total=True)


def _modules(e: Explanation) -> Table:
    rows = tuple({"module": m.name or "(none)"} | picked(m, "gpu_ns share count") for m in e.modules)
    title = "GPU time by module (layers together)"
    return Table(MODULES, title, _shares("module"), rows, _and_more(e.modules[TOP:]), most=TOP)


def _shares(what: str) -> tuple[Column, ...]:
    return columns(f"{what} | gpu_ns: GPU [ms] | share | count: kernels")


def _and_more(rest: Sequence[Share] | Sequence[Kernel]) -> tuple[str, ...]:
    """What a table of the largest leaves out."""
    time, share = sum(one.gpu_ns for one in rest), sum(one.share for one in rest)
    return (f"and {len(rest)} more: {units.milliseconds(time)} ms, {units.percent(share)}",) if rest else ()


def kernels_table(e: Explanation, most: int) -> Table:
    """The kernels that take longest, each under a name that no other has."""
    names = unique_names(kernel.name for kernel in e.kernels[:most])
    shown = columns("name: kernel | kind | count | gpu_ns: GPU [ms] | mean_ns | share", labels={"name": names})
    rows = tuple(msgspec.structs.asdict(kernel) for kernel in e.kernels)
    title = f"Kernels by GPU time, {len(rows)} in all"
    return Table(KERNELS, title, shown, rows, _and_more(e.kernels[most:]), most=most)


def _operators(e: Explanation) -> Table:
    rest = e.operators[TOP:]
    gpu, host = sum(one.gpu_share for one in rest), sum(one.host_share for one in rest)
    more = f"and {len(rest)} more: {units.percent(gpu)} of the GPU's time, {units.percent(host)} of the CPU's"
    rows = tuple(msgspec.structs.asdict(one) for one in e.operators)
    shown = columns(
        "name: op or CUDA call | calls [count] | gpu_self_ns: GPU self [ms] | gpu_share: of the GPU [share] | "
        "host_self_ns: CPU self [ms] | host_share: of the CPU [share] | gpu_total_ns: GPU total [ms] | "
        "host_total_ns: CPU total [ms]"
    )
    title = f"Operators by self time on GPU and CPU, {len(rows)} in all"
    return Table(OPERATORS, title, shown, rows, (more,) if rest else (), most=TOP)


def _idle(e: Explanation) -> Table:
    rows = [
        {"cause": cause, "idle_ns": ns / e.steady_steps, "share": ns / max(e.window_ns * e.steady_steps, 1)}
        for cause, ns in e.idle.by_cause_ns.items()
        if ns
    ]
    for row in rows if e.untraced_idle is not None else ():
        ns = (
            e.untraced_idle.by_cause_ns.get(str(row["cause"]), 0) / e.steady_steps
            if e.untraced_idle is not None
            else 0.0
        )
        row |= {"untraced_ns": ns, "untraced_share": ns / max(e.step_ns, 1)}
    untraced = "untraced_ns: untraced [ms] | untraced_share: of the step"
    shown = columns(f"cause | {untraced} | idle_ns: traced [ms] | share: of the traced step")
    return Table(IDLE, "GPU idle time by cause", shown, tuple(rows))


def _overview(explanations: Sequence[Explanation], names: Sequence[str], what: str = "trace") -> Table:
    rows = tuple(
        {
            what: name,
            **picked(e, "steps window_ns busy_ns"),
            **_untraced_columns(e),
            "idle_share": traced_idle_share(e),
            "mfu": e.waterfall.mfu if e.waterfall else None,
            **{f"{p.name}_ns": p.gpu_ns for p in e.phases},
            "verdict": in_two_words(e.bound),
        }
        for e, name in zip(explanations, names, strict=True)
    )
    found = {p.name for e in explanations for p in e.phases}
    phases = " | ".join(f"{phase}_ns [ms]" for phase in PHASES if phase in found)
    shown = columns(" | ".join(filter(None, (f"{what} | steps", _CLOCKS, "mfu", phases, "verdict"))), keep="verdict")
    timings = dict.fromkeys(e.timings for e in explanations if e.timings)
    which = "one for all traces" if len(timings) == 1 else "by trace"
    notes = [*(f"untraced times, {which}: {one}" for one in timings), *_estimates(explanations)]
    waits = together(names, explanations).describe() if what == "device" else ""
    title = "Steps, GPU time per step" if what == "trace" else "Devices, GPU time per step"
    return Table(f"{what}s", title, shown, rows, tuple(filter(None, (waits, *notes))))


def _estimates(explanations: Sequence[Explanation]) -> list[str]:
    estimated = any(e.untraced_step is not None and not e.untraced_step.measured for e in explanations)
    text = "untraced times that no run measured are estimates: the view of a single trace has the range"
    return [text] if estimated else []


def _untraced_columns(e: Explanation) -> dict[str, float | None]:
    """The step without a profiler, measured or estimated."""
    step_ns = e.host_ns.get(STEP) if e.untraced_step is None else e.untraced_step.ns
    return {"untraced_ns": step_ns, "untraced_idle_share": None if e.untraced_idle is None else idle_share(e)}


def changes_view(before: Explanation, after: Explanation) -> View:
    """The step, its idle and busy time, and kernel by kernel what a change saved; the rows add up to the GPU's time."""
    kernels = [picked(c, f"name kind {_TIMES} {_COUNTS}") for c in changes(before, after)]
    traces = zip(_COUNTS.split(), (before, after), strict=True)
    counts = {key: sum(p.count + p.copies for p in e.phases) for key, e in traces}
    gpu = _change(before.gpu_ns, after.gpu_ns) | counts
    totals = {
        "step": _change(before.window_ns, after.window_ns),
        "gpu_busy": _change(before.busy_ns, after.busy_ns),
        "gpu_idle": _change(before.window_ns - before.busy_ns, after.window_ns - after.busy_ns),
        "gpu_time": _change(before.gpu_ns, after.gpu_ns),
    }
    paths = {"before": before.path, "after": after.path}
    rest = _rest(gpu, kernels)
    content = document("explain-against", **paths, totals=totals, kernels=kernels, everything_else=rest)
    newer, older = short_paths([after.path, before.path])
    rows = tuple({"what": _TOTALS[key], **row} for key, row in totals.items())
    total_table = Table("totals", f"{newer} compared with {older}, per step", columns(f"what | {_IN_MS}"), rows)
    return View([total_table, _kernel_changes(kernels, gpu)], content)


def _change(before_ns: float, after_ns: float) -> dict[str, float]:
    return {"before_ns": before_ns, "after_ns": after_ns, "saved_ns": before_ns - after_ns}


def _rest(whole: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the rows leave of the whole; what is left by rounding is nothing."""
    left = {key: whole[key] - sum(row[key] for row in rows) for key in f"{_TIMES} {_COUNTS}".split()}
    return {key: value if abs(value) > 1e-6 * max(abs(whole[key]), 1.0) else 0.0 for key, value in left.items()}


def _kernel_changes(kernels: Sequence[dict[str, Any]], gpu: Mapping[str, float]) -> Table:
    kept = [*kernels[:TOP], *kernels[-TOP:]] if len(kernels) > 2 * TOP else list(kernels)
    left_out = len(kernels) - len(kept)
    rest = _rest(gpu, kept)
    others = f"everything else: {f'{left_out} more kernels, ' if left_out else ''}copies, graphs"
    rows = [*kept, *([{"name": others, **rest}] if left_out or any(rest.values()) else []), {"name": "all", **gpu}]
    names = unique_names(row["name"] for row in kept)
    heading = f"name: kernel | {_IN_MS} | kind | before_count [count] | after_count [count]"
    shown = columns(heading, labels={"name": names})
    notes = (f"the {TOP} largest savings and the {TOP} largest losses of {len(kernels)} kernels",) if left_out else ()
    return Table("changes", "GPU time by kernel, per step", shown, tuple(rows), notes, total=True)
