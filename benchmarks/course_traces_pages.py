"""Tables and the chart of what course_traces.py has explained: size by context, one table for each question. No GPU."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flopwise.analysis.explanation import Explanation, Kernel
from flopwise.records.table import Column, Table
from flopwise.render.table import columns

SMALLEST_PHASE = 0.01  # of the GPU time: the loss, 25 µs, is not compared
CLASSES = (
    "matmul",
    "elementwise",
    "optimizer",
    "reduction",
    "copy/cast",
)  # the chart's; the rest together is below 2 %
Found = Mapping[str, Explanation]  # by the case's name: SIZE-tCONTEXT-train, or -inference


def question_tables(found: Found) -> list[Table]:
    """The five questions and the verdict, from one profiler's traces."""
    return [
        _by_size("(a) forward: GPU ms / host's clock, untraced, ms", found, _forward),
        _by_size("GPU idle, untraced (traced), and the verdict", found, _idle),
        _by_size("(b) top kernel of forward: tile, count, share of forward's GPU time", found, _top_forward),
        _by_size("(b) top kernel of forward and backward: tile, count, share of their GPU time", found, _top_both),
        _by_size("(c) besides matmul, of forward's GPU time: elementwise + reduction + copy/cast", found, _besides),
        _by_size("(d) matmul, of the GPU time: inference / forward / training step", found, _matmul(found)),
        _by_size("(e) attention, forward: softmax ms / matmuls ms (softmax, of their time)", found, _softmax),
    ]


def agreement(kineto: Found, nsys: Found) -> Table:
    """Two captures of a step, one by each profiler: what they count, and how far apart their times are."""
    rows = []
    for case, a in kineto.items():
        if (b := nsys.get(case)) is None:
            continue
        phases, classes = ({s.name: s for s in shares} for shares in (b.phases, b.classes))
        rows.append({
            "case": case,
            "kernels": sum(k.count for k in a.kernels), "nsys_kernels": sum(k.count for k in b.kernels),
            "launches": a.launches, "nsys_launches": b.launches,
            "phase": max(abs(p.gpu_ns / phases[p.name].gpu_ns - 1) for p in a.phases if p.share > SMALLEST_PHASE),
            "class": max(abs(c.share - classes[c.name].share) for c in a.classes),
            "phased": min(e.coverage["phase"] for e in (a, b)), "module": min(e.coverage["module"] for e in (a, b)),
        })  # fmt: skip
    heading = (
        "case | kernels: kernels, Kineto [number] | nsys_kernels: nsys [number] | launches: launches, Kineto [number] | "
        "nsys_launches: nsys [number] | phase: a phase's GPU time, at most | class: a class's share, at most | "
        "phased: with a phase [share] | module: with a module [share]"
    )
    fine = {key: {row[key]: f"{100 * row[key]:.2f} %" for row in rows} for key in ("phase", "class")}
    return Table("agreement", "Two profilers: how far apart", columns(heading, labels=fine), tuple(rows))


def per_trace(kineto: Found, nsys: Found) -> Table:
    """Raw values, one row for each trace, with the kernels' whole names."""
    rows = [
        {
            "case": case, "profiler": profiler, "step_traced_ns": e.window_ns, "step_untraced_ns": e.host_ns.get("step"),
            "gpu_busy_ns": e.busy_ns, "untraced_idle_ns": e.untraced_idle.total_ns / e.steady_steps if e.untraced_idle else None,
            "launches": e.launches, "kernels": sum(k.count for k in e.kernels), "launch_bound": e.launch_bound,
            **{f"{p.name}_gpu_ns": p.gpu_ns for p in e.phases}, "forward_untraced_ns": e.host_ns.get("forward"),
            **{f"{kind}_ns": ns for kind, ns in ((c.name, c.gpu_ns) for c in e.classes)},
            **{f"matmul_share_{what}": share for what, share in e.matmul_share.items()},
            "softmax_ns": e.attention.softmax_ns, "attention_matmul_ns": e.attention.matmul_ns,
            "softmax_flops_share": e.attention.softmax_flops_share,
            **_named("top_forward", e.top_forward), **_named("top_forward_backward", e.top_forward_backward),
            "module_coverage": e.coverage["module"], "verdict": e.verdict,
        }
        for profiler, found in (("kineto", kineto), ("nsys", nsys)) for case, e in found.items()
    ]  # fmt: skip
    keys = dict.fromkeys(key for row in rows for key in row)
    return Table("traces", "Per trace", tuple(Column(key, key) for key in keys), tuple(rows))


def draw(found: Found, path: Path) -> None:
    """Shares of a training step's GPU time by class over context, one panel for each size."""
    import altair

    from flopwise.render.charts import COLOURS, save

    alt: Any = altair
    rows = [
        {"size": case.partition("-")[0], "context": _context(case), "class": kind, "order": i, "share": 100 * share}
        for case, e in found.items() if case.endswith("-train")
        for i, (kind, share) in enumerate(_chart_shares(e).items())
    ]  # fmt: skip
    kinds = [*CLASSES, "the rest"]
    bars = alt.Chart(alt.Data(values=rows)).mark_bar()
    bars = bars.encode(
        x=alt.X("context:O", title="context", sort=None).axis(labelAngle=0),
        y=alt.Y("share:Q", title="share of the step's GPU time, %").scale(domain=[0, 100]),
        color=alt.Color("class:N", title="class", sort=kinds).scale(domain=kinds, range=[*COLOURS[:5], "#999999"]),
        order=alt.Order("order:Q"),
    )
    sizes = list(dict.fromkeys(case.partition("-")[0] for case in found))
    panels = bars.properties(width=120, height=240).facet(
        column=alt.Column("size:N", title=None, sort=sizes), spacing=12
    )
    save(panels, path)


def _chart_shares(e: Explanation) -> dict[str, float]:
    shares = {share.name: share.share for share in e.classes}
    known = {kind: shares.get(kind, 0.0) for kind in CLASSES}
    return known | {"the rest": 1 - sum(known.values())}


def _by_size(title: str, found: Found, cell: Callable[[str, Explanation], str]) -> Table:
    """A row for each size, a column for each context, training only."""
    rows: dict[str, dict[str, Any]] = {}
    for case, e in found.items():
        if case.endswith("-train"):
            size = case.partition("-")[0]
            rows.setdefault(size, {"size": size})[str(_context(case))] = cell(case, e)
    contexts = sorted({int(key) for row in rows.values() for key in row if key != "size"})
    shown = (Column("size"), *(Column(str(context)) for context in contexts))
    return Table("sizes", title, shown, tuple(rows.values()))


def _context(case: str) -> int:
    return int(case.split("-")[1].removeprefix("t"))


def _ms(ns: float | None) -> str:
    return (
        ""
        if ns is None
        else f"{ns / 1e6:.0f}"
        if ns >= 99.5e6
        else f"{ns / 1e6:.1f}"
        if ns >= 1e6
        else f"{ns / 1e6:.2f}"
    )


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _forward(_: str, e: Explanation) -> str:
    return f"{_ms(sum(e.phase_classes['forward'].values()))} / {_ms(e.host_ns.get('forward'))}"


def _idle(_: str, e: Explanation) -> str:
    traced = _share(e.idle.total_ns / (e.window_ns * e.steady_steps))
    untraced = e.untraced_idle.total_ns if e.untraced_idle else None
    alone = "unknown" if untraced is None else _share(untraced / (untraced + e.busy_ns * e.steady_steps))
    return f"{alone} ({traced}) {'launch' if e.launch_bound else 'GPU'}"


def _top_forward(_: str, e: Explanation) -> str:
    return _kernel(e.top_forward, sum(e.phase_classes["forward"].values()))


def _top_both(_: str, e: Explanation) -> str:
    both = sum(sum(e.phase_classes.get(phase, {}).values()) for phase in ("forward", "backward"))
    return _kernel(e.top_forward_backward, both)


def _kernel(kernel: Kernel | None, of_ns: float) -> str:
    return f"{tile(kernel.name)}, {kernel.count:.0f}, {_share(kernel.gpu_ns / of_ns)}" if kernel else ""


def tile(name: str) -> str:
    """What tells one fp32 matmul kernel from another.

    >>> tile("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma")
    'xmma tn 64x64'
    >>> tile("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)")
    'cutlass nn 256x128'
    """
    if found := re.search(r"xmma_gemm_\w+?_([nt]{2})_n_tilesize(\d+x\d+)x", name):
        return f"xmma {found[1]} {found[2]}"
    if found := re.search(r"cutlass_80_simt_sgemm_(\d+x\d+)_\w+?_([nt]{2})_", name):
        return f"cutlass {found[2]} {found[1]}"
    return name


def _besides(_: str, e: Explanation) -> str:
    forward = e.phase_classes["forward"]
    return " + ".join(
        f"{100 * forward.get(k, 0) / sum(forward.values()):.0f}" for k in CLASSES if k not in ("matmul", "optimizer")
    )


def _matmul(found: Found) -> Callable[[str, Explanation], str]:
    def cell(case: str, e: Explanation) -> str:
        alone = found.get(case.replace("-train", "-inference"))
        inference = f"{100 * alone.matmul_share['inference']:.1f} / " if alone else ""
        return f"{inference}{100 * e.matmul_share['forward']:.1f} / {100 * e.matmul_share['step']:.1f} %"

    return cell


def _softmax(_: str, e: Explanation) -> str:
    parts = e.attention
    return f"{_ms(parts.softmax_ns)} / {_ms(parts.matmul_ns)} ({_share(parts.softmax_time_share or 0)})"


def _named(what: str, kernel: Kernel | None) -> dict[str, Any]:
    return {what: kernel.name, f"{what}_count": kernel.count, f"{what}_gpu_ns": kernel.gpu_ns} if kernel else {}


def overhead(timed: Sequence[Any]) -> Table:
    """The step untraced, how often it was measured, and what each profiler made of it."""
    nsys = {one.name: one.nsys_step_ns for one in timed if one.nsys_step_ns}
    rows = []
    for one in timed:
        times = one.point.times() if one.point else None
        if one.point and times:
            wall = statistics.median(times.wall_ns)
            kineto, other = one.point.traced_step_ns, nsys.get(one.name)
            rows.append({
                "case": one.name, "wall_ms": wall / 1e6, "n": len(times.wall_ns),
                "spread": (max(times.wall_ns) - min(times.wall_ns)) / wall if len(times.wall_ns) > 1 else None,
                "kineto": kineto / wall - 1, "nsys": other / wall - 1 if other else None,
            })  # fmt: skip
    heading = (
        "case | wall_ms: step, untraced, ms [number] | n: samples | spread: least to most [share] | "
        "kineto: Kineto adds [signed_share] | nsys: nsys adds [signed_share]"
    )
    return Table("overhead", "What tracing costs", columns(heading), tuple(rows))
