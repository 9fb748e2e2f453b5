"""What a user is shown of two traces against each other: every row adds up to the GPU's time before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

from flopwise import units
from flopwise.analysis.explanation import Explanation
from flopwise.render.json import document
from flopwise.render.kernel_names import told_apart
from flopwise.render.short_paths import short_paths
from flopwise.render.table import Column, Table, View

TOP = 12  # of the largest savings, and of the largest losses
_MS = units.milliseconds
_TIMES = ("before_ns", "after_ns", "saved_ns")
_COUNTS = ("before_count", "after_count")


def changes_view(before: Explanation, after: Explanation, changes: Sequence[Any]) -> View:
    """The step, its idle and busy time, and kernel by kernel what a change saved."""
    kernels = [
        {name: getattr(c, name) for name in ("name", "kind", *_TIMES, *_COUNTS)} for c in changes
    ]  # the largest saving first
    totals = _totals(before, after)
    gpu = _gpu_time(before, after)
    content = document(
        "explain-against",
        before=before.path,
        after=after.path,
        totals=totals,
        kernels=kernels,
        everything_else=_rest(gpu, kernels),
    )
    newer, older = short_paths([after.path, before.path])
    return [_total_table(f"{newer} against {older}, per step", totals), _kernel_table(kernels, gpu)], content


def _change(before_ns: float, after_ns: float) -> dict[str, float]:
    return {"before_ns": before_ns, "after_ns": after_ns, "saved_ns": before_ns - after_ns}


def _totals(before: Explanation, after: Explanation) -> dict[str, dict[str, float]]:
    """`step` is `gpu_busy` and `gpu_idle` together; `gpu_time` adds up what ran, also where it ran at once."""
    return {
        "step": _change(before.window_ns, after.window_ns),
        "gpu_busy": _change(before.busy_ns, after.busy_ns),
        "gpu_idle": _change(before.window_ns - before.busy_ns, after.window_ns - after.busy_ns),
        "gpu_time": _change(before.gpu_ns, after.gpu_ns),
    }


def _gpu_time(before: Explanation, after: Explanation) -> dict[str, float]:
    """All GPU work of a step: kernels, copies and graphs."""
    counts = {key: sum(p.count + p.copies for p in e.phases) for key, e in zip(_COUNTS, (before, after), strict=True)}
    return _change(before.gpu_ns, after.gpu_ns) | counts


def _rest(whole: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the rows leave of the whole; what is left by rounding is nothing."""
    left = {key: whole[key] - sum(row[key] for row in rows) for key in (*_TIMES, *_COUNTS)}
    return {key: value if abs(value) > 1e-6 * max(abs(whole[key]), 1.0) else 0.0 for key, value in left.items()}


def _total_table(title: str, totals: Mapping[str, Mapping[str, float]]) -> Table:
    columns = (Column("what", "what", right=False), *_time_columns())
    shown = {"step": "step", "gpu_busy": "GPU busy", "gpu_idle": "GPU idle", "gpu_time": "GPU time, added up"}
    return Table(title=title, columns=columns, rows=tuple({"what": shown[key], **row} for key, row in totals.items()))


def _time_columns() -> tuple[Column, ...]:
    return (
        Column("before_ns", "ms before", _MS),
        Column("after_ns", "ms after", _MS),
        Column("saved_ns", "saved ms", _MS),
    )


def _kernel_table(kernels: Sequence[Mapping[str, Any]], gpu: Mapping[str, float]) -> Table:
    kept = [*kernels[:TOP], *kernels[-TOP:]] if len(kernels) > 2 * TOP else list(kernels)
    left_out = len(kernels) - len(kept)
    names = told_apart(row["name"] for row in kept)
    what = (
        f"everything else: {left_out} kernels more, copies, graphs" if left_out else "everything else: copies, graphs"
    )
    rest = _rest(gpu, kept)
    rows = [*kept, *([{"name": what, **rest}] if left_out or any(rest.values()) else []), {"name": "all", **gpu}]
    columns = (
        Column("name", "kernel", lambda name: names.get(name, name), right=False),
        Column("kind", "class", right=False),
        Column("before_count", "count before", units.count),
        Column("after_count", "after", units.count),
        *_time_columns(),
    )
    notes = (f"the {TOP} largest savings and the {TOP} largest losses of {len(kernels)} kernels",) if left_out else ()
    return Table(title="GPU time by kernel, per step", columns=columns, rows=tuple(rows), notes=notes)
