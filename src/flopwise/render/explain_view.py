"""What a user is shown of a trace: one in full, several side by side."""

from collections.abc import Sequence

import msgspec

from flopwise import units
from flopwise.analysis.explanation import Explanation, Kernel, Share
from flopwise.records.run import STEP
from flopwise.render.json import document
from flopwise.render.kernel_names import told_apart
from flopwise.render.short_paths import short_paths
from flopwise.render.table import Column, Table, View
from flopwise.render.waterfall_view import waterfall_table
from flopwise.trace.phases import PHASES

TOP = 12
_SAME = "the same"
_MS = units.milliseconds


class _Again(str):
    """A kernel's name that stands beside itself: a person reads 'the same', a spreadsheet the name."""


def explanation_view(explanation: Explanation) -> View:
    """The waterfall, phases by class, modules, the top kernels, idle time by cause, and the course's five questions."""
    tables = [
        _summary(explanation),
        *([waterfall_table(explanation.waterfall)] if explanation.waterfall else []),
        _phases(explanation),
        _modules(explanation),
        _kernels(explanation),
        _idle(explanation),
    ]
    return [*tables, _answers([explanation])], document("explain", traces=[explanation])


def explanations_view(explanations: Sequence[Explanation]) -> View:
    """One row per trace."""
    return [_overview(explanations), _answers(explanations)], document("explain", traces=list(explanations))


_SLOWED = (
    "that is the traced step: a profiler slows the host, and the step alone may wait less; "
    "flopwise profile measures both, --timings RUN gives the clock of a run without it"
)


def _names(explanations: Sequence[Explanation]) -> list[str]:
    return short_paths([e.path for e in explanations])


def _percent(share: float) -> str:
    return units.percent(share)


def _summary(e: Explanation) -> Table:
    where = f" on {e.gpu}" if e.gpu else ""
    covered = ", ".join(f"{name} {units.percent(share)}" for name, share in e.coverage.items())
    notes = [
        e.verdict,
        *([_SLOWED] if e.launch_bound and e.untraced_idle is None else []),
        f"measured: {_steps(e)}; times are of one step",
        f"GPU time attributed to a: {covered}",
        *(f"matmuls: {units.percent(share, 0)} of their time in {what}" for what, share in e.matmul_precision.items()),
        *_untraced(e),
        *_overlap(e),
        *_softmax_beside_matmul(e),
        *e.notes,
    ]
    row = {
        "window_ns": e.window_ns,
        "busy_ns": e.busy_ns,
        "idle_share": e.idle.total_ns / max(e.window_ns * e.steps, 1),
        "gpu_ns": e.gpu_ns,
        "launches": e.launches,
    }
    columns = (
        Column("window_ns", "step ms", _MS),
        Column("busy_ns", "GPU busy ms", _MS),
        Column("idle_share", "GPU idle", _percent),
        Column("gpu_ns", "kernels added up ms", _MS),
        Column("launches", "launches", units.count),
    )
    return Table(title=f"{_names([e])[0]}: {e.source} trace{where}", columns=columns, rows=(row,), notes=tuple(notes))


def _steps(e: Explanation) -> str:
    """How many steps there are, and how that is known.

    >>> from types import SimpleNamespace
    >>> [_steps(SimpleNamespace(steps=n, steps_found_by=how)) for n, how in ((1, "whole trace"), (2, "ranges"))]
    ['1 step, the whole trace', '2 steps, found by ranges']
    """
    number = "1 step" if e.steps == 1 else f"{e.steps} steps"
    return (
        f"{number}, the whole trace" if e.steps_found_by == "whole trace" else f"{number}, found by {e.steps_found_by}"
    )


def _untraced(e: Explanation) -> tuple[str, ...]:
    """The step without a profiler, and whose clock that is."""
    if STEP not in e.host_ns:
        return ()
    whose = f" ({e.timings})" if e.timings else ""
    return (f"untraced, the step takes {units.duration(e.host_ns[STEP])} of wall time{whose}",)


def _overlap(e: Explanation) -> tuple[str, ...]:
    """Why kernels added up can be more than the time the GPU was busy."""
    if not e.overlap_ns:
        return ()
    both, one = units.duration(e.overlap_ns), units.duration(e.stream_overlap_ns)
    return (f"overlap: {both} of the GPU time added up ran beside other work, {one} of it on the same stream",)


def _softmax_beside_matmul(e: Explanation) -> tuple[str, ...]:
    """Question (e): softmax does a small share of attention's FLOPs and takes a large share of its time."""
    parts = e.attention
    if parts.softmax_time_share is None:
        return ()
    time = units.percent(parts.softmax_time_share, 0)
    found = f"attention, forward: softmax takes {time} of the time of softmax and its matmuls"
    if parts.softmax_flops is None or parts.matmul_flops is None or parts.rate_ratio is None:
        none = parts.softmax_flops is None and parts.matmul_flops is None
        why = "no shapes in this trace" if none else "not every op has its shapes"
        return (f"{found}; their FLOPs are unknown: {why}",)
    softmax, matmul = (
        units.rate(flops / ns * 1e9, "FLOP/s")
        for flops, ns in ((parts.softmax_flops, parts.softmax_ns), (parts.matmul_flops, parts.matmul_ns))
    )
    share = units.percent(parts.softmax_flops_share or 0.0)
    return (f"{found} and does {share} of their FLOPs: {softmax} against {matmul}, 1 to {parts.rate_ratio:.0f}",)


def _phases(e: Explanation) -> Table:
    kinds = [share.name for share in e.classes]
    rows = [
        {"phase": p.name, "gpu_ns": p.gpu_ns, "share": p.share, "count": p.count}
        | {f"{kind}_ns": e.phase_classes.get(p.name, {}).get(kind) for kind in kinds}
        for p in e.phases
    ]
    columns = [
        Column("phase", "phase", right=False),
        Column("gpu_ns", "GPU ms", _MS),
        Column("share", "share", _percent),
    ]
    columns += [Column("count", "kernels", units.count), *(Column(f"{kind}_ns", kind, _MS) for kind in kinds)]
    total = {
        "phase": "all",
        "gpu_ns": sum(p.gpu_ns for p in e.phases),
        "share": 1.0,
        "count": sum(p.count for p in e.phases),
    }
    total |= {f"{share.name}_ns": share.gpu_ns for share in e.classes}
    return Table(title="GPU time by phase and class", columns=tuple(columns), rows=(*rows, total))


def _modules(e: Explanation) -> Table:
    rows = tuple(
        {"module": m.name or "(none)", "gpu_ns": m.gpu_ns, "share": m.share, "count": m.count} for m in e.modules[:TOP]
    )
    columns = (
        Column("module", "module", right=False),
        Column("gpu_ns", "GPU ms", _MS),
        Column("share", "share", _percent),
        Column("count", "kernels", units.count),
    )
    notes = _and_more(e.modules[TOP:])
    return Table(title="GPU time by module (layers together)", columns=columns, rows=rows, notes=notes)


def _and_more(rest: Sequence[Share] | Sequence[Kernel]) -> tuple[str, ...]:
    """What a table of the largest leaves out."""
    if not rest:
        return ()
    took = sum(one.gpu_ns for one in rest)
    return (f"and {len(rest)} more: {_MS(took)} ms, {_percent(sum(one.share for one in rest))}",)


def _kernels(e: Explanation) -> Table:
    top = e.kernels[:TOP]
    names = told_apart(kernel.name for kernel in top)
    columns = (
        Column("name", "kernel", names.__getitem__, right=False),
        Column("kind", "class", right=False),
        Column("count", "count", units.count),
        Column("gpu_ns", "GPU ms", _MS),
        Column("mean_ns", "mean", units.duration),
        Column("share", "share", _percent),
    )
    rows = tuple(msgspec.structs.asdict(kernel) for kernel in top)
    title = f"top kernels, of {len(e.kernels)}"
    return Table(title=title, columns=columns, rows=rows, notes=_and_more(e.kernels[TOP:]))


def _idle(e: Explanation) -> Table:
    window = max(e.window_ns * e.steps, 1)
    rows = tuple(
        {"cause": cause, "idle_ns": ns / e.steps, "share": ns / window} for cause, ns in e.idle.by_cause_ns.items()
    )
    columns = (
        Column("cause", "cause", right=False),
        Column("idle_ns", "ms", _MS),
        Column("share", "of the step", _percent),
    )
    return Table(title="GPU idle, by cause", columns=columns, rows=rows)


def _overview(explanations: Sequence[Explanation]) -> Table:
    rows = tuple(
        {
            "trace": name,
            "steps": e.steps,
            "window_ns": e.window_ns,
            "busy_ns": e.busy_ns,
            "idle_share": e.idle.total_ns / max(e.window_ns * e.steps, 1),
            "untraced_ns": e.host_ns.get(STEP),
            "untraced_idle_share": _untraced_idle_share(e),
            "mfu": e.waterfall.mfu if e.waterfall else None,
            **{f"{p.name}_ns": p.gpu_ns for p in e.phases},
            "verdict": e.verdict.split(":")[0],
        }
        for e, name in zip(explanations, _names(explanations), strict=True)
    )
    found = {p.name for e in explanations for p in e.phases}
    phases = [phase for phase in PHASES if phase in found]
    columns = [Column("trace", "trace", right=False), Column("steps", "steps"), Column("window_ns", "step ms", _MS)]
    columns += [Column("busy_ns", "GPU busy ms", _MS), Column("idle_share", "GPU idle", _percent)]
    where_known = (
        Column("untraced_ns", "untraced ms", _MS),
        Column("untraced_idle_share", "GPU idle, untraced", _percent),
        Column("mfu", "MFU", _percent),
    )
    columns += [column for column in where_known if any(row[column.key] is not None for row in rows)]
    columns += [Column(f"{phase}_ns", f"{phase} ms", _MS) for phase in phases] + [
        Column("verdict", "verdict", right=False)
    ]
    clocks = dict.fromkeys(e.timings for e in explanations if e.timings)
    which = "one for all traces" if len(clocks) == 1 else "by trace"
    notes = tuple(f"host's clock, {which}: {clock}" for clock in clocks)
    return Table(title="steps, GPU time per step", columns=tuple(columns), rows=rows, notes=notes)


def _untraced_idle_share(e: Explanation) -> float | None:
    """Of the untraced step, where its clock is known to be of the same work."""
    if e.untraced_idle is None:
        return None
    idle_ns = e.untraced_idle.total_ns
    return idle_ns / max(e.busy_ns * e.steps + idle_ns, 1)


def _answers(explanations: Sequence[Explanation]) -> Table:
    """The course's questions: (a) forward, (b) its top kernel, (c) what besides matmul, (d) matmul's share, (e) softmax."""
    rows = []
    for e, trace in zip(explanations, _names(explanations), strict=True):
        forward = e.phase_classes.get("forward", {})
        others = sorted(((ns, kind) for kind, ns in forward.items() if kind != "matmul"), reverse=True)[:3]
        total = sum(forward.values()) or 1.0
        rows.append(
            {
                "trace": trace,
                "forward_ns": total if forward else None,
                "host_forward_ns": e.host_ns.get("forward"),
                "top_kernel": e.top_forward.name if e.top_forward else None,
                "top_count": e.top_forward.count if e.top_forward else None,
                "top_with_backward": _top_with_backward(e),
                "top_with_backward_count": e.top_forward_backward.count if e.top_forward_backward else None,
                "besides": ", ".join(f"{kind} {units.percent(ns / total, 0)}" for ns, kind in others),
                **{f"matmul_{what}": e.matmul_share.get(what) for what in ("inference", "forward", "step")},
                "softmax_ns": e.attention.softmax_ns or None,
                "attention_matmul_ns": e.attention.matmul_ns or None,
                "softmax_time": e.attention.softmax_time_share,
                "softmax_flops": e.attention.softmax_flops_share,
                "fused_attention_ns": e.attention.fused_ns or None,
            }
        )
    names = told_apart(str(row[key]) for row in rows for key in ("top_kernel", "top_with_backward") if row[key])
    columns = (
        Column("trace", "trace", right=False),
        Column("forward_ns", "(a) forward GPU ms", _MS),
        Column("host_forward_ns", "host's clock ms", _MS),
        Column("top_kernel", "(b) top forward kernel", names.__getitem__, right=False),
        Column("top_count", "count", units.count),
        Column(
            "top_with_backward",
            "top with backward",
            lambda name: _SAME if isinstance(name, _Again) else names[name],
            right=False,
        ),
        Column("top_with_backward_count", "count", units.count),
        Column("besides", "(c) besides matmul", right=False),
        Column("matmul_inference", "(d) matmul, inference", _percent),
        Column("matmul_forward", "(d) matmul, forward", _percent),
        Column("matmul_step", "matmul, step", _percent),
        Column("softmax_ns", "(e) softmax ms", _MS),
        Column("attention_matmul_ns", "its matmuls ms", _MS),
        Column("softmax_time", "softmax, of their time", _percent),
        Column("softmax_flops", "of their FLOPs", _percent),
        Column("fused_attention_ns", "fused ms", _MS),
    )
    used = tuple(c for c in columns if any(row[c.key] is not None for row in rows))
    return Table(title="the five questions, per step", columns=used, rows=tuple(rows))


def _top_with_backward(e: Explanation) -> str | None:
    """Question (b) asks whether it is the same kernel when the backward pass counts, too."""
    if e.top_forward_backward is None:
        return None
    same = e.top_forward is not None and e.top_forward.name == e.top_forward_backward.name
    return _Again(e.top_forward_backward.name) if same else e.top_forward_backward.name
