"""The sections of a report, one function per kind of evidence: a part in, a section out, or None where there is nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from flopwise import units
from flopwise.analysis.clocks import summarise
from flopwise.analysis.explanation import Explanation, Kernel
from flopwise.records.run import Point
from flopwise.render.comparison_view import comparison_view
from flopwise.render.explain_view import explanation_view
from flopwise.render.kernel_names import told_apart
from flopwise.render.memory_view import memory_view
from flopwise.render.memory_view import timeline_chart as memory_timeline
from flopwise.render.report.evidence import (
    MEASURED,
    NO_ROOFLINE,
    PREDICTED,
    SPLIT,
    Advice,
    Block,
    Picture,
    ReportPart,
    Section,
    Shown,
)
from flopwise.render.report.lab_sections import lab_sections
from flopwise.render.report.provenance import provenance
from flopwise.render.report.tune_sections import tune_sections
from flopwise.render.roofline_view import ON_A_PAGE, drawn, roofline_view
from flopwise.render.run_view import run_view
from flopwise.render.step_charts import icicle_chart, icicle_parts, phases_chart, timeline_chart
from flopwise.render.sweep_charts import (
    MEASURES,
    before_after_chart,
    points_chart,
    predicted_chart,
    predicted_steps_chart,
    samples_chart,
    sweep_chart,
    sweep_rows,
)
from flopwise.render.table import Column, Table
from flopwise.render.waterfall_chart import waterfall_chart
from flopwise.render.waterfall_view import waterfall_table

MOST_KERNELS = 200  # rows of the page's table; what comes after is one note
MOST_SAMPLED = 6  # points whose samples are drawn
_APART = ("top kernels", "the five questions", "from the ideal")  # tables of `explain` that have a section of their own
_ENOUGH, _TOO_SHORT = 100, 5  # letters of a kernel's name
_MS = units.milliseconds


def sections(part: ReportPart) -> list[Section]:
    """Findings first, then the evidence, then where it comes from."""
    first = lab_sections(part.lab) if part.lab is not None else tune_sections(part.tuning) if part.tuning else []
    return [*first, *(found for build in SECTIONS if (found := build(part)) is not None)]


def _findings(part: ReportPart) -> Section | None:
    if not part.findings:
        return None
    kernels = part.explanation.kernels[:MOST_KERNELS] if part.explanation else ()
    short = told_apart(kernel.name for kernel in kernels)
    about = tuple(
        tuple((anchor(i), short[k.name]) for i, k in enumerate(kernels) if _mentions(finding.evidence, k, short))
        for finding in part.findings
    )
    title = "What was found before anything was changed" if part.tuning else "What to change"
    return Section(key="findings", title=title, blocks=(Advice(part.findings, about),))


def _mentions(evidence: Sequence[str], kernel: Kernel, short: dict[str, str]) -> bool:
    """Evidence may cut a long name short; a name of a few letters is in everything and tells nothing."""
    told = [name for name in (kernel.name[:_ENOUGH], short[kernel.name]) if len(name) > _TOO_SHORT]
    return any(name in line for line in evidence for name in told)


def anchor(place: int) -> str:
    """The name of a kernel's row.

    >>> anchor(0)
    'kernel-1'
    """
    return f"kernel-{place + 1}"


def _waterfall(part: ReportPart) -> Section | None:
    found = part.waterfall
    if found is None:
        return None
    table = waterfall_table(found)
    columns = tuple(c for c in table.columns if c.key != "ends_at_ns")  # bars of letters: the picture has them
    table = Table(title=table.title, columns=columns, rows=table.rows, notes=table.notes)
    picture = Picture(
        "waterfall",
        lambda: waterfall_chart(found, ""),
        f"From the useful work at the chip's peak rate to the {units.duration(found.step_ns)} that the step takes: "
        "the parts add up.",
        how=SPLIT,
    )
    return Section(key="waterfall", title="Where every millisecond goes", blocks=(picture, Shown(table, how=SPLIT)))


def _gpu_time(part: ReportPart) -> Section | None:
    e = part.explanation
    if e is None:
        return None
    tables = {table.title: table for table in explanation_view(e)[0]}
    kept = [t for title, t in tables.items() if not title.startswith(_APART)]
    questions = [t for title, t in tables.items() if title.startswith("the five questions")]
    blocks: list[Block] = [Shown(kept[0])]
    if e.phase_class_modules:
        parts = e.phase_class_modules
        caption = "GPU time of a step: by phase, by class within it, by module within that."
        use = "Click a part to go into it, double-click to come out; or choose it from the list."
        into = icicle_parts(parts)
        blocks.append(Picture("gpu-time", lambda: icicle_chart(parts), caption, use=use, parts=into))
        blocks.append(Shown(_parts_table(e), folded=True))
    blocks += [Shown(table) for table in kept[1:]]
    blocks += [Shown(table, folded=True) for table in questions]
    return Section(key="gpu-time", title="What the GPU does", blocks=tuple(blocks))


def _parts_table(e: Explanation) -> Table:
    columns = (
        Column("phase", "phase", right=False),
        Column("kind", "class", right=False),
        Column("module", "module", lambda name: name or "(none)", right=False),
        Column("gpu_ns", "GPU ms", _MS),
        Column("share", "share", units.percent),
        Column("count", "kernels", units.count),
    )
    rows = tuple(msgspec.structs.asdict(one) for one in e.phase_class_modules)
    return Table(title="GPU time by phase, class and module", columns=columns, rows=rows)


def _timeline(part: ReportPart) -> Section | None:
    found = part.timeline
    if found is None:
        return None
    left_out = f" {found.streams_left_out} streams with less work are left out." if found.streams_left_out else ""
    caption = (
        f"Step {found.step + 1} of {found.steps}, {units.duration(found.duration_ns)} as traced: what the host launched, what "
        f"each stream did, and how idle the GPU was. Pieces closer than {units.duration(found.pixel_ns)} are drawn as one, in "
        f"the colour of most of their time.{left_out}"
    )
    picture = Picture("timeline", lambda: timeline_chart(found), caption)
    return Section(key="timeline", title="One step, as it happened", blocks=(picture,))


def _kernels(part: ReportPart) -> Section | None:
    e = part.explanation
    if e is None or not e.kernels:
        return None
    top, rest = e.kernels[:MOST_KERNELS], e.kernels[MOST_KERNELS:]
    names = told_apart(kernel.name for kernel in top)
    columns = (
        Column("name", "kernel", names.__getitem__, right=False),
        Column("kind", "class", right=False),
        Column("count", "count", units.count),
        Column("gpu_ns", "GPU ms", _MS),
        Column("mean_ns", "mean", units.duration),
        Column("share", "share", units.percent),
    )
    notes = (
        (f"and {len(rest)} more: {_MS(sum(k.gpu_ns for k in rest))} ms, {units.percent(sum(k.share for k in rest))}",)
        if rest
        else ()
    )
    rows = tuple(msgspec.structs.asdict(kernel) for kernel in top)
    table = Table(title=f"Kernels by GPU time, {len(e.kernels)} in all", columns=columns, rows=rows, notes=notes)
    anchors = tuple(anchor(i) for i in range(len(top)))
    return Section(key="kernels", title="Kernels", blocks=(Shown(table, anchors=anchors),))


def _roofline(part: ReportPart) -> Section | None:
    found, title = part.roofline, "How far from the limit"
    if found is None:
        why = [note for note in part.notes if note.startswith(NO_ROOFLINE)]
        return Section(key="roofline", title=title, blocks=tuple(why)) if why else None
    caption = (
        "Operations under the machine's roofs: FLOPs per byte across, FLOP/s upwards; the area of a dot is its time, of the "
        "whole trace and not of one step. A dot far below its roof has room."
    )
    picture = Picture("roofline", lambda: drawn(found), caption, how=found.how)
    tables = [
        replace(table, title=table.title.removesuffix(f", {found.how}")) for table in roofline_view(found, ON_A_PAGE)[0]
    ]
    shown = tuple(Shown(table, how=found.how) for table in tables)
    return Section(key="roofline", title=title, blocks=(picture, *shown) if found.points else shown)


def _memory(part: ReportPart) -> Section | None:
    found = part.memory
    if found is None:
        return None
    tables = memory_view(found)[0]
    blocks: list[Block] = []
    if found.devices and len(found.devices[0].timeline.event) > 1:
        caption = "Allocated memory over time, by owner; the strip below says in which phase."
        blocks.append(Picture("memory", lambda: memory_timeline(found), caption, how=found.obtained))
    if found.devices and found.predictions and found.obtained == MEASURED:
        caption = "Whose bytes at the peak: measured, and what the predictions said."
        blocks.append(
            Picture("memory-predicted", lambda: predicted_chart(found), caption, how="measured and predicted")
        )
    foretold = ("what each lever", "what it would need")
    for place, table in enumerate(map(_without_place, tables)):
        how = PREDICTED if table.title.startswith(foretold) else found.obtained
        blocks.append(Shown(table, how=how, folded=place > 1 and not table.title.startswith(foretold)))
    return Section(key="memory", title="Who holds the memory", blocks=tuple(blocks))


def _pairs(part: ReportPart) -> Section | None:
    if not part.pairs:
        return None
    rows = [_pair_row(a, b) for a, b, _ in part.pairs]
    rows += [row for a, b, _ in part.pairs[:1] for row in _phase_rows(a, b)]
    picture = Picture(
        "before-after",
        lambda: before_after_chart(rows),
        "Before and after, measured in turns; lines are 95 % intervals.",
    )
    table = comparison_view(part.pairs, (), ())[0][0]
    return Section(key="before-after", title="Before and after", blocks=(picture, Shown(table)))


def _pair_row(a: Point, b: Point) -> dict[str, object]:
    _, rows = sweep_rows((a, b))
    row: dict[str, object] = {"name": "step"}
    for which, found in zip(("before", "after"), rows, strict=True):
        row |= {f"{which}_ms": found["wall_ms"], f"{which}_low": found["wall_low"], f"{which}_high": found["wall_high"]}
    return row


def _phase_rows(a: Point, b: Point) -> list[dict[str, object]]:
    before, after = ({s.phase: s.wall for s in summarise(point)[1:]} for point in (a, b))
    return [
        {
            "name": phase,
            "before_ms": wall.median / 1e6,
            "before_low": (wall.low or wall.median) / 1e6,
            "before_high": (wall.high or wall.median) / 1e6,
            "after_ms": after[phase].median / 1e6,
            "after_low": (after[phase].low or after[phase].median) / 1e6,
            "after_high": (after[phase].high or after[phase].median) / 1e6,
        }
        for phase, wall in before.items()
        if phase in after
    ]


def _measured(part: ReportPart) -> Section | None:
    if part.run is None or not part.points:
        return None
    points = part.points
    axis, rows = sweep_rows(points)
    blocks: list[Block] = []
    if len(points) > 2 and axis and len({row["x"] for row in rows}) > 1:
        for measure, title in MEASURES.items():
            if sum(row.get(measure) is not None for row in rows) > 1:
                bands = "; bands: 95 % of the median" if measure == "wall_ms" else ""
                caption = f"{title[0].upper()}{title[1:]} over {axis}{bands}."
                blocks.append(Picture(f"sweep-{measure}", _sweep(axis, rows, measure), caption))
    elif len(points) > 1 and not part.pairs and part.tuning is None:
        blocks.append(
            Picture("points", lambda: points_chart(rows), "The step of each point; lines are 95 % intervals.")
        )
    if len(points) <= MOST_SAMPLED:
        caption = "Every sample, in the order taken, with the median and its 95 % interval. None is dropped."
        blocks.append(Picture("samples", lambda: samples_chart(points), caption))
    blocks += [Shown(_without_place(table), folded=part.tuning is not None) for table in run_view(part.run)[0]]
    return Section(key="measured", title="What was measured", blocks=tuple(blocks))


def _foretold(part: ReportPart) -> Section | None:
    if not part.foretold:
        return None
    steps = part.foretold
    rows = [
        {"name": one.name, "measured_ms": one.measured_ns / 1e6, "predicted_ms": one.predicted_ns / 1e6}
        for one in steps
    ]
    ceilings = " and ".join(sorted({one.how for one in steps}))
    caption = f"The step's time as measured, and as flopwise account predicts it from {ceilings} ceilings of this GPU."
    picture = Picture("predicted-steps", lambda: predicted_steps_chart(rows), caption, how="measured and predicted")
    columns = (
        Column("what", "workload", right=False),
        Column("measured_ns", "measured ms", _MS),
        Column("predicted_ns", "predicted ms", _MS),
        Column("error", "error", lambda share: f"{100 * share:+.1f} %"),
        Column("gpu_ns", "GPU ms", _MS),
        Column("predicted_gpu_ns", "GPU predicted ms", _MS),
        Column("bound", "predicted bound", right=False),
    )
    table = Table(
        title="Step time, predicted and measured",
        columns=columns,
        rows=tuple({**vars(one), "error": one.error} for one in steps),
    )
    return Section(
        key="predicted", title="Predicted and measured", blocks=(picture, Shown(table, how="measured and predicted"))
    )


def side_by_side(parts: Sequence[ReportPart]) -> Section | None:
    """Several traces of one report beside each other."""
    told = [(i + 1, part, part.explanation) for i, part in enumerate(parts) if part.explanation is not None]
    if len(told) < 2:
        return None
    steps = [(f"{number}. {part.name}", e) for number, part, e in told]
    picture = Picture(
        "side-by-side",
        lambda: phases_chart(steps),
        "A step of each trace, as traced: GPU time by class of work, and how long the GPU was idle.",
    )
    columns = (
        Column("name", "trace", right=False),
        Column("step_ns", "step ms", _MS),
        Column("gpu_ns", "GPU ms", _MS),
        Column("idle", "idle", units.percent),
        Column("mfu", "MFU", units.percent),
        Column("peak", "of the peak in", right=False),
        Column("verdict", "verdict", right=False),
    )
    rows = tuple(
        {
            "name": f"{number}. {part.name}",
            "step_ns": e.window_ns,
            "gpu_ns": e.gpu_ns,
            "idle": max(0.0, e.window_ns - e.busy_ns) / e.window_ns if e.window_ns else None,
            "mfu": part.waterfall.mfu if part.waterfall else None,
            "peak": part.waterfall.precision if part.waterfall and part.waterfall.mfu is not None else None,
            "verdict": e.verdict,
        }
        for number, part, e in told
    )
    table = Table(title="A step of each trace", columns=columns, rows=rows)
    return Section(key="side-by-side", title="Side by side", blocks=(picture, Shown(table)))


def _without_place(table: Table) -> Table:
    """Where a run lies on the disk is nobody's business but its owner's: a page is passed on."""
    notes = tuple(note for note in table.notes if not note.startswith("kept in "))
    return Table(title=table.title, columns=table.columns, rows=table.rows, notes=notes)


def _sweep(axis: str, rows: list[dict[str, object]], measure: str) -> Callable[[], object]:
    return lambda: sweep_chart(axis, rows, measure)


# A new kind of evidence is a field of ReportPart and a function here.
SECTIONS: tuple[Callable[[ReportPart], Section | None], ...] = (
    _findings, _waterfall, _pairs, _gpu_time, _timeline, _roofline, _memory, _measured, _foretold,
    _kernels, provenance,
)  # fmt: skip
