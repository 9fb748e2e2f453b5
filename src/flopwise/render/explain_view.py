"""What a user is shown of a trace: one in full, several side by side, two against each other."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwise import units
from flopwise.analysis.explanation import Explanation, Kernel, Share
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View

TOP = 12
# What tells one instance of a template from another: its functor, its reduction, or the cutlass kernel it wraps.
_TELLING = re.compile(
    r"<.*?\b(\w*[Ff]unctor\w*(?!.*[Ff]unctor)|\w+Ops|\w+_kernel_cuda|\w+_kernel_impl|\w+_kernel(?=\())|<(cutlass_\w+)"
)
_TEMPLATE = re.compile(r"<[^<>]*>")
_MS = units.milliseconds


def explanation_view(explanation: Explanation) -> View:
    """Phases by class, modules, the top kernels, idle time by cause, and the course's five questions."""
    tables = [
        _summary(explanation),
        _phases(explanation),
        _modules(explanation),
        _kernels(explanation),
        _idle(explanation),
    ]
    return [*tables, _answers([explanation])], document("explain", traces=[explanation])


def explanations_view(explanations: Sequence[Explanation]) -> View:
    """One row per trace."""
    return [_overview(explanations), _answers(explanations)], document("explain", traces=list(explanations))


def _name(explanation: Explanation) -> str:
    return Path(explanation.path).name


def _percent(share: float) -> str:
    return units.percent(share)


def _summary(e: Explanation) -> Table:
    where = f" on {e.gpu}" if e.gpu else ""
    covered = ", ".join(f"{name} {units.percent(share)}" for name, share in e.coverage.items())
    notes = [
        e.verdict,
        f"measured: {e.steps} steps, found by {e.steps_found_by}; times are of one step",
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
    return Table(title=f"{_name(e)}: {e.source} trace{where}", columns=columns, rows=(row,), notes=tuple(notes))


def _untraced(e: Explanation) -> tuple[str, ...]:
    """The step without a profiler, and whose clock that is."""
    if "step" not in e.host_ns:
        return ()
    whose = f" ({e.timings})" if e.timings else ""
    return (f"untraced, the step takes {units.duration(e.host_ns['step'])} of wall time{whose}",)


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
    return _share_table("GPU time by module (layers together)", "module", e.modules[:TOP])


def _share_table(title: str, what: str, shares: Sequence[Share]) -> Table:
    rows = tuple({what: s.name or "(none)", "gpu_ns": s.gpu_ns, "share": s.share, "count": s.count} for s in shares)
    columns = (
        Column(what, what, right=False),
        Column("gpu_ns", "GPU ms", _MS),
        Column("share", "share", _percent),
        Column("count", "kernels", units.count),
    )
    return Table(title=title, columns=columns, rows=rows)


def _kernels(e: Explanation) -> Table:
    rows = tuple(_kernel_row(kernel) for kernel in e.kernels[:TOP])
    columns = (
        Column("kernel", "kernel", shortened, right=False),
        Column("class", "class", right=False),
        Column("count", "count", units.count),
        Column("gpu_ns", "GPU ms", _MS),
        Column("mean_ns", "mean", units.duration),
        Column("share", "share", _percent),
    )
    return Table(title=f"top kernels, of {len(e.kernels)}", columns=columns, rows=rows)


def _kernel_row(k: Kernel) -> dict[str, Any]:
    return {
        "kernel": k.name,
        "class": k.kind,
        "count": k.count,
        "gpu_ns": k.gpu_ns,
        "mean_ns": k.mean_ns,
        "share": k.share,
    }


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
            "trace": _name(e),
            "steps": e.steps,
            "window_ns": e.window_ns,
            "busy_ns": e.busy_ns,
            "idle_share": e.idle.total_ns / max(e.window_ns * e.steps, 1),
            **{f"{p.name}_ns": p.gpu_ns for p in e.phases},
            "verdict": e.verdict.split(":")[0],
        }
        for e in explanations
    )
    phases = dict.fromkeys(p.name for e in explanations for p in e.phases)
    columns = [Column("trace", "trace", right=False), Column("steps", "steps"), Column("window_ns", "step ms", _MS)]
    columns += [Column("busy_ns", "GPU busy ms", _MS), Column("idle_share", "GPU idle", _percent)]
    columns += [Column(f"{phase}_ns", f"{phase} ms", _MS) for phase in phases] + [
        Column("verdict", "verdict", right=False)
    ]
    clocks = dict.fromkeys(e.timings for e in explanations if e.timings)
    which = "one for all traces" if len(clocks) == 1 else "by trace"
    notes = tuple(f"host's clock, {which}: {clock}" for clock in clocks)
    return Table(title="steps, GPU time per step", columns=tuple(columns), rows=rows, notes=notes)


def _answers(explanations: Sequence[Explanation]) -> Table:
    """The course's questions: (a) forward, (b) its top kernel, (c) what besides matmul, (d) matmul's share, (e) softmax."""
    rows = []
    for e in explanations:
        forward = e.phase_classes.get("forward", {})
        others = sorted(((ns, kind) for kind, ns in forward.items() if kind != "matmul"), reverse=True)[:3]
        total = sum(forward.values()) or 1.0
        rows.append(
            {
                "trace": _name(e),
                "forward_ns": total if forward else None,
                "host_forward_ns": e.host_ns.get("forward"),
                "top_kernel": e.top_forward.name if e.top_forward else None,
                "top_count": e.top_forward.count if e.top_forward else None,
                "same": _same(e),
                "besides": ", ".join(f"{kind} {units.percent(ns / total, 0)}" for ns, kind in others),
                **{f"matmul_{what}": e.matmul_share.get(what) for what in ("inference", "forward", "step")},
                "softmax_ns": e.attention.softmax_ns or None,
                "attention_matmul_ns": e.attention.matmul_ns or None,
                "softmax_time": e.attention.softmax_time_share,
                "softmax_flops": e.attention.softmax_flops_share,
                "fused_attention_ns": e.attention.fused_ns or None,
            }
        )
    columns = (
        Column("trace", "trace", right=False),
        Column("forward_ns", "(a) forward GPU ms", _MS),
        Column("host_forward_ns", "host's clock ms", _MS),
        Column("top_kernel", "(b) top forward kernel", shortened, right=False),
        Column("top_count", "count", units.count),
        Column("same", "top with backward", right=False),
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


def _same(e: Explanation) -> str:
    if e.top_forward is None or e.top_forward_backward is None:
        return ""
    return "the same" if e.top_forward.name == e.top_forward_backward.name else shortened(e.top_forward_backward.name)


def changes_view(before: Explanation, after: Explanation, changes: Sequence[Any]) -> View:
    """Kernel by kernel, what a change saved."""
    rows = tuple(
        {
            "kernel": c.name,
            "class": c.kind,
            "before_ns": c.before_ns,
            "after_ns": c.after_ns,
            "before_count": c.before_count,
            "after_count": c.after_count,
            "saved_ns": c.saved_ns,
        }
        for c in changes
    )
    columns = (
        Column("kernel", "kernel", shortened, right=False),
        Column("class", "class", right=False),
        Column("before_count", "count before", units.count),
        Column("after_count", "after", units.count),
        Column("before_ns", "ms before", _MS),
        Column("after_ns", "after", _MS),
        Column("saved_ns", "saved ms", _MS),
    )
    kept = (*rows[:TOP], *rows[-TOP:]) if len(rows) > 2 * TOP else rows
    saved = before.window_ns - after.window_ns
    notes = (
        f"step: {units.duration(before.window_ns)} before, {units.duration(after.window_ns)} after, "
        f"{units.duration(saved)} saved; "
        f"GPU time: {units.duration(before.gpu_ns)} before, {units.duration(after.gpu_ns)} after",
    )
    table = Table(title=f"{_name(before)} against {_name(after)}, per step", columns=columns, rows=kept, notes=notes)
    content = document("explain-against", before=before.path, after=after.path, kernels=rows)
    return [table], content


def shortened(name: str, limit: int = 70) -> str:
    """A kernel's name for people: the template that tells what it does, without the rest.

    >>> shortened("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float> > >(ReduceOp<float>)")
    'at::native::reduce_kernel<MeanOps>'
    >>> shortened("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>(cutlass_80_simt_sgemm_256x128::Params)")
    'cutlass::Kernel2<cutlass_80_simt_sgemm_256x128>'
    """
    text = name.removeprefix("void ")
    if telling := _TELLING.search(text):
        text = f"{text.partition('<')[0]}<{telling[1] or telling[2]}>"
    else:
        while _TEMPLATE.search(text):
            text = _TEMPLATE.sub("‹›", text)
        text = re.sub(r"\([^()]*\)$", "", text).replace("‹›", "<…>")
    return text if len(text) <= limit else text[: limit - 1] + "…"
