"""The sections of a report, one function per kind of evidence: a part in, a section out, or None where there is nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from flopwise import units
from flopwise.analysis.clocks import summarise
from flopwise.analysis.explanation import Explanation, idle_share
from flopwise.analysis.matching import Compared, compare_clocks
from flopwise.analysis.roofline import Roofline, RooflinePoint
from flopwise.analysis.verdict import in_two_words
from flopwise.records.limit import StepLimit
from flopwise.records.ranks import RanksExplanation
from flopwise.records.run import Environment, Point
from flopwise.records.table import Table
from flopwise.records.training import Training
from flopwise.records.tuning import Tuning
from flopwise.render import explain_view, memory_view, ranks_view, run_charts, step_charts, train_view
from flopwise.render.comparison_view import comparison_view
from flopwise.render.host_view import host_view
from flopwise.render.limit_view import LIMIT, limit_name, limit_table
from flopwise.render.memory_charts import predicted_chart
from flopwise.render.memory_charts import timeline_chart as memory_timeline
from flopwise.render.names import unique_names
from flopwise.render.ranks_charts import ranks_timeline_chart
from flopwise.render.report import evidence
from flopwise.render.report.evidence import Advice, Block, ChartBlock, CodeBlock, ReportPart, Section, TableBlock
from flopwise.render.report.lab_sections import lab_sections
from flopwise.render.report.overview import attempt_names, waterfall_picture
from flopwise.render.report.verdict import short_command
from flopwise.render.roofline_view import ON_A_PAGE, POINTS, drawn, roofline_view
from flopwise.render.run_view import run_tables
from flopwise.render.table import columns
from flopwise.render.tune_view import ATTEMPTS, RECIPE, tune_view, tuned_limit, tuned_recipe
from flopwise.render.waterfall_view import waterfall_table
from flopwise.version import __version__

MOST_KERNELS = 200  # rows of the page's table; the rest are one note
MOST_SAMPLED = 6  # points whose samples are drawn
_NAME_START, _TOO_SHORT = 100, 5  # letters of a kernel's name


def sections(part: ReportPart) -> list[Section]:
    """Findings first, then the evidence, then where it comes from."""
    first = lab_sections(part.lab) if part.lab is not None else _tuning(part.tuning) if part.tuning else []
    first = _training(part.training) if part.training is not None else first
    return [*first, *(found for build in SECTIONS if (found := build(part)) is not None)]


def _tuning(tuning: Tuning) -> list[Section]:
    """The result first, then how it was found."""
    tables = {table.key: table for table in tune_view(tuning).tables}
    recipe, tried = tables.pop(RECIPE), tables.pop(ATTEMPTS)
    found = [Section("recipe", "The recipe", _recipe(tuning, recipe))] if recipe.rows else []
    found.append(Section("attempts", "What was tried", (*_savings(tuning), TableBlock(tried, how=evidence.BOTH))))
    limit = _limit(tuned_limit(tuning))
    tables.pop(LIMIT, None)
    falls = tuple(TableBlock(table, how=evidence.SPLIT) for table in tables.values())
    found += [Section("falls", "Before and after", falls)] if falls else []
    return [*found, *([Section("limit", "What is left of the tuned step", limit)] if limit else [])]


def _limit(found: StepLimit | None) -> tuple[Block, ...]:
    """A step to its power-capped limit: the picture and its numbers."""
    if found is None:
        return ()
    caption = f"From the {limit_name(found)} of {units.duration(found.limit_ns)} to the step: what takes the rest."
    chart = ChartBlock("limit", lambda: step_charts.limit_chart(found, ""), caption, how=evidence.SPLIT)
    return chart, TableBlock(limit_table(found), how=evidence.SPLIT)


def _training(training: Training) -> list[Section]:
    """The curves, then every row."""
    losses, speeds = train_view.loss_rows(training), train_view.speed_rows(training)
    drawn: list[Block] = []
    if losses:
        caption = "The loss of every batch, and of text that is held out."
        drawn.append(ChartBlock("loss", partial(train_view.loss_chart, losses), caption))
    if speeds:
        caption = "Tokens per second, loader and logging included; coloured by what the steps waited for."
        drawn.append(ChartBlock("speed", partial(train_view.speed_chart, speeds), caption))
    tables = tuple(TableBlock(table, folded=True) for table in train_view.train_view(training).tables)
    return [Section("curves", "Curves", tuple(drawn)), Section("rows", "Every row of the log", tables)]


def _recipe(tuning: Tuning, table: Table) -> tuple[Block, ...]:
    """The file, how to use it, and the same in PyTorch."""
    lines = [str(row["code"]) for row in table.rows if row.get("code")]
    code = (("The same in PyTorch", "\n".join(lines), "python"),) if lines else ()
    return (table.title, CodeBlock((("recipe.toml", tuned_recipe(tuning), "toml"), *code)))


def _savings(tuning: Tuning) -> list[ChartBlock]:
    timed = [a for a in tuning.attempts if a.saved_ns is not None and a.predicted_ns is not None]
    rows = [
        {"name": name, "predicted_ms": (a.predicted_ns or 0) / 1e6, "measured_ms": (a.saved_ns or 0) / 1e6}
        for name, a in zip(attempt_names(timed), timed, strict=True)
    ]
    caption = (
        "What each change was predicted to save of a step, and what it saved. On the line, the prediction was right."
    )
    chart = partial(run_charts.predicted_measured_chart, rows)
    return [ChartBlock("predicted-measured", chart, caption, how=evidence.BOTH)] if rows else []


def _findings(part: ReportPart) -> Section | None:
    if not part.findings:
        return None
    kernels = part.explanation.kernels[:MOST_KERNELS] if part.explanation else ()
    short = unique_names(kernel.name for kernel in kernels)
    about = tuple(
        tuple((_anchor(i), short[k.name]) for i, k in enumerate(kernels) if k.name in finding.kernels)
        for finding in part.findings
    )
    title = "Findings before anything was changed" if part.tuning else "All changes"
    return Section("findings", title, (Advice(part.findings, about),))


def _anchor(place: int) -> str:
    """The name of a kernel's row."""
    return f"kernel-{place + 1}"


def _waterfall(part: ReportPart) -> Section | None:
    found = part.waterfall
    if found is None:
        return None
    table = TableBlock(waterfall_table(found, bars=False), how=evidence.SPLIT)
    picture = (waterfall_picture(found),) if part.tuning else ()  # else it is at the top
    limit = () if part.tuning else _limit(found.limit)  # of a tuning, the tuned step's is shown
    return Section("waterfall", "Where every millisecond goes", (*picture, table, *limit))


def _gpu_time(part: ReportPart) -> Section | None:
    e = part.explanation
    if e is None:
        return None
    tables = {table.key: TableBlock(table) for table in explain_view.explanation_view(e).tables}
    blocks: list[Block] = [tables[explain_view.SUMMARY]]
    if parts := e.phase_class_modules:
        caption = "GPU time of a step: by phase, by class within it, by module within that."
        use = "Click a part to go into it, double-click to come out; or choose it from the list."
        into = step_charts.icicle_parts(parts)
        chart = partial(step_charts.icicle_chart, parts)
        blocks += [
            ChartBlock("gpu-time", chart, caption, use=use, parts=into),
            TableBlock(_parts_table(e), folded=True),
        ]
    blocks += [tables[key] for key in (explain_view.PHASE_TABLE, explain_view.MODULES, explain_view.IDLE)]
    blocks.append(replace(tables[explain_view.OPERATORS], folded=True))
    return Section("gpu-time", "What the GPU does", tuple(blocks))


def _parts_table(e: Explanation) -> Table:
    rows = tuple(msgspec.structs.asdict(one) | {"module": one.module or "(none)"} for one in e.phase_class_modules)
    shown = columns("phase | kind | module | gpu_ns: GPU [ms] | share | count: kernels")
    return Table("parts", "GPU time by phase, class and module", shown, rows)


def _host_time(part: ReportPart) -> Section | None:
    """Of a trace without GPU work: the findings stand above."""
    if part.host is None:
        return None
    open_ = ("summary", "phases", "ops")
    tables = [one for one in host_view(part.host).tables if not one.key.startswith("finding")]
    blocks = tuple(TableBlock(table, folded=table.key not in open_) for table in tables)
    return Section("cpu-time", "What the CPU does", blocks)


def _timeline(part: ReportPart) -> Section | None:
    found = part.timeline
    if found is None:
        return None
    left_out = f" {found.streams_left_out} streams with less work are left out." if found.streams_left_out else ""
    caption = (
        f"Step {found.step + 1} of {found.steps}, {units.duration(found.duration_ns)} as traced: what the CPU launched, what "
        f"each stream did, and how idle the GPU was. Pieces closer than {units.duration(found.pixel_ns)} are drawn as one, in "
        f"the colour of most of their time.{left_out}"
    )
    picture = ChartBlock("timeline", lambda: step_charts.timeline_chart(found), caption)
    return Section("timeline", "One step over time", (picture,))


def _ranks(part: ReportPart) -> Section | None:
    """Of several ranks: one step over time, a lane for each; then for whom the others wait, and every rank."""
    e = part.ranks
    if e is None:
        return None
    blocks: list[Block] = []
    if (drawn_step := e.timeline) is not None:
        left_out = f" {drawn_step.left_out} ranks are left out." if drawn_step.left_out else ""
        caption = (
            f"{drawn_step.step or 'One step'}, {units.duration(drawn_step.duration_ns)}, on one clock: each rank computes, waits "
            f"for the last one to arrive at a collective, moves data, or is idle.{left_out}"
        )
        blocks.append(ChartBlock("ranks", partial(ranks_timeline_chart, drawn_step), caption))
    tables = (ranks_view.stragglers_table(e), ranks_view.ranks_table(e))
    blocks += [TableBlock(table) for table in tables if table.rows]
    return Section("ranks", "Who waits for whom", tuple(blocks))


def _collectives(part: ReportPart) -> Section | None:
    e = part.ranks
    if e is None:
        return None
    tables = (ranks_view.groups_table(e), ranks_view.collectives_table(e, len(e.collectives)))
    blocks = tuple(TableBlock(table, folded=table.key == ranks_view.COLLECTIVES) for table in tables)
    return Section("collectives", "Collectives", blocks)


def _kernels(part: ReportPart) -> Section | None:
    e = part.explanation
    if e is None or not e.kernels:
        return None
    anchors = tuple(_anchor(i) for i in range(min(len(e.kernels), MOST_KERNELS)))
    table = _with_shapes(explain_view.kernels_table(e, MOST_KERNELS), part.roofline)
    return Section("kernels", "Kernels", (TableBlock(table, anchors=anchors),))


def _with_shapes(table: Table, found: Roofline | None) -> Table:
    """Kernels with the operation that launched them and its sizes: those of most of their time."""
    most: dict[str, RooflinePoint] = {}
    for point in found.points if found is not None else ():
        if point.kernel not in most or point.ns > most[point.kernel].ns:
            most[point.kernel] = point
    about = {name: {"op": point.op, "shapes": point.shapes} for name, point in most.items()}
    rows = tuple({**row, **about.get(row["name"], {})} for row in table.rows)
    first, *others = table.columns
    return replace(table, columns=(first, *columns("op: launched by | shapes"), *others), rows=rows)


def _roofline(part: ReportPart) -> Section | None:
    found, title = part.roofline, "How far from the limit"
    if found is None:
        return Section("roofline", title, (f"No roofline: {part.no_roofline}",)) if part.no_roofline else None
    caption = (
        "Operations under the machine's roofs: FLOPs per byte across, FLOP/s upwards; the area of a dot is its time, of the "
        "whole trace and not of one step. A dot far below its roof has room."
    )
    picture = ChartBlock("roofline", lambda: drawn(found), caption, how=found.how)
    tables = roofline_view(found, ON_A_PAGE).tables
    shown = tuple(
        TableBlock(_for_page(one, found), how=found.how, folded=bool(found.points) and one.key != POINTS)
        for one in tables
    )
    return Section("roofline", title, (picture, *shown) if found.points else shown)


def _for_page(table: Table, found: Roofline) -> Table:
    """With the sizes next to the operation's name, and without `how` in its title, which the block says."""
    if table.key != POINTS:
        return table
    name, *others = table.columns
    others.sort(key=lambda column: column.key != "shapes")
    return replace(table, title=found.title, columns=(name, *others))


def _memory(part: ReportPart) -> Section | None:
    found = part.memory
    if found is None:
        return None
    blocks: list[Block] = []
    if found.devices and len(found.devices[0].timeline.event) > 1:
        caption = "Allocated memory over time, by owner; the strip below shows the phase."
        blocks.append(ChartBlock("memory", lambda: memory_timeline(found), caption, how=found.obtained))
    if found.devices and found.predictions and found.obtained == evidence.MEASURED:
        caption = "Peak memory by owner, measured and predicted."
        blocks.append(ChartBlock("memory-predicted", lambda: predicted_chart(found), caption, how=evidence.BOTH))
    predicted = (memory_view.LEVERS, memory_view.NEEDED)
    open_ = (memory_view.SUMMARY, memory_view.OWNERS, *predicted)
    for table in memory_view.memory_view(found, place=False).tables:
        how = evidence.PREDICTED if table.key in predicted else found.obtained
        blocks.append(TableBlock(table, how=how, folded=table.key not in open_))
    return Section("memory", "Who holds the memory", tuple(blocks))


def _pairs(part: ReportPart) -> Section | None:
    if not part.pairs:
        return None
    rows = [row for a, b, _ in part.pairs for row in _pair_rows(a, b)[:1]] + _pair_rows(*part.pairs[0][:2])[1:]
    caption = "Before and after, in pairs of processes; lines are 95 % intervals of one side's samples."
    picture = ChartBlock("before-after", lambda: run_charts.before_after_chart(rows), caption)
    clocks = compare_clocks(*part.pairs[0][:2]) if len(part.pairs) == 1 else {}
    compared = comparison_view(Compared(part.pairs, clocks=clocks)).tables[0]
    return Section("before-after", "Before and after", (picture, TableBlock(compared)))


def _pair_rows(a: Point, b: Point) -> list[dict[str, Any]]:
    """The step, then its phases, each before and after."""
    before, after = ({summary.phase: summary.wall for summary in summarise(point)} for point in (a, b))
    ms = run_charts.interval_ms
    return [
        {"name": phase, **ms(wall, "before"), **ms(after[phase], "after")}
        for phase, wall in before.items()
        if phase in after
    ]


def _measured(part: ReportPart) -> Section | None:
    if part.run is None or not part.points:
        return None
    points = part.points
    axis, rows = run_charts.sweep_rows(points)
    blocks: list[Block] = []
    if len(points) > 2 and axis and len({row["x"] for row in rows}) > 1:
        blocks += _sweep_pictures(axis, rows)
    elif len(points) > 1 and not part.pairs and part.tuning is None:
        bars, left_out = run_charts.points_drawn(rows)
        caption = f"The step of each point; lines are 95 % intervals.{left_out}"
        blocks.append(ChartBlock("points", lambda: run_charts.points_chart(bars), caption))
    if len(points) <= MOST_SAMPLED:
        caption = "Every sample, in the order taken, with the median and its 95 % interval. None is dropped."
        blocks.append(ChartBlock("samples", lambda: run_charts.samples_chart(points), caption))
    folded = part.tuning is not None
    blocks += [TableBlock(table, folded=folded) for table in run_tables(part.run, place=False)]
    return Section("measured", "What was measured", tuple(blocks))


def _sweep_pictures(axis: str, rows: list[dict[str, Any]]) -> list[ChartBlock]:
    """Every measure that several points have, over the size."""
    bands = {"wall_ms": "; bands: 95 % interval of the median"}
    drawn, left_out = run_charts.lines_drawn(rows)
    return [
        ChartBlock(
            f"sweep-{measure}",
            partial(run_charts.sweep_chart, axis, drawn, measure),
            f"{title[0].upper()}{title[1:]} over {axis}{bands.get(measure, '')}.{left_out}",
        )
        for measure, title in run_charts.MEASURES.items()
        if sum(row.get(measure) is not None for row in rows) > 1
    ]


def _predicted(part: ReportPart) -> Section | None:
    steps = part.predictions
    if not steps:
        return None
    rows = [
        {"name": one.name, "measured_ms": one.measured_ns / 1e6, "predicted_ms": one.predicted_ns / 1e6}
        for one in steps
    ]
    ceilings = " and ".join(sorted({one.how for one in steps}))
    caption = f"The step's time as measured, and as flopwise account predicts it from {ceilings} ceilings of this GPU."
    measured = len(part.run.points) if part.run else 0
    some = f"{len(steps)} of {measured:,} points are predicted" if len(steps) < measured else ""
    caption += f" {some}." if some else ""
    picture = ChartBlock("predicted-steps", lambda: run_charts.predicted_steps_chart(rows), caption, how=evidence.BOTH)
    shown = columns(
        "workload | measured_ns [ms] | predicted_ns [ms] | error [signed_share] | gpu_ns: GPU [ms] | "
        "predicted_gpu_ns: GPU predicted [ms] | bound: predicted bound"
    )
    values = tuple({**vars(one), "error": one.error} for one in steps)
    table = Table("predicted-steps", "Step time, predicted and measured", shown, values, (some,) if some else ())
    return Section("predicted", "Predicted and measured", (picture, TableBlock(table, how=evidence.BOTH)))


def side_by_side(parts: Sequence[ReportPart]) -> Section | None:
    """Several traces of one report."""
    traced = [(f"{i}. {part.name}", part, e) for i, part in enumerate(parts, 1) if (e := part.explanation) is not None]
    if len(traced) < 2:
        return None
    steps = [(name, e) for name, _, e in traced]
    caption = "A step of each trace without its profiler: GPU time by class of work, and how long the GPU is idle."
    picture = ChartBlock("side-by-side", lambda: step_charts.phases_chart(steps), caption)
    rows = tuple(
        {
            "name": name,
            "step_ns": e.step_ns,
            "reachable_ns": e.reach.reachable_ns if e.reach is not None else None,
            "gpu_ns": e.gpu_ns,
            "idle_share": idle_share(e),
            "mfu": part.waterfall.mfu if part.waterfall else None,
            "peak": part.waterfall.precision if part.waterfall and part.waterfall.mfu is not None else None,
            "verdict": in_two_words(e.bound),
        }
        for name, part, e in traced
    )
    shown = columns(
        "name: trace | step_ns [ms] | reachable_ns [ms] | gpu_ns: GPU [ms] | idle_share: GPU idle | mfu | "
        "peak: of the peak in | verdict"
    )
    table = Table("side-by-side", "A step of each trace", shown, rows)
    estimated = any(e.untraced_step is not None and not e.untraced_step.measured for _, e in steps)
    how = evidence.BOTH if estimated else evidence.MEASURED
    return Section("side-by-side", "Side by side", (replace(picture, how=how), TableBlock(table, how=how)))


def provenance(part: ReportPart) -> Section | None:
    """What was read, on which machine it was captured, and by which command."""
    facts: dict[str, Any] = {}
    if part.run is not None:
        header = part.run.header
        facts |= {"run": header.id, "begun": header.created_at, "command": short_command(header.command)}
        places = [p.environment for p in part.run.points if p.environment]
        places += [r.place.environment for r in part.lab.results if r.place and r.place.environment] if part.lab else []
        facts |= _environment(places[0]) if places else {}
    if part.explanation is not None:
        facts |= {"trace": Path(part.explanation.path).name, "profiler": part.explanation.source}
        facts.setdefault("GPU", part.explanation.gpu)
    facts |= _of_ranks(part.ranks)
    if part.memory is not None and part.memory.path:
        facts["snapshot"] = Path(part.memory.path).name
    if part.roofline is not None:
        facts["ceilings"] = f"{part.roofline.ceilings.how}, of {part.roofline.ceilings.gpu}"
    facts["page made by"] = f"flopwise {__version__}"
    rows = tuple({"what": what, "value": value} for what, value in facts.items() if value)
    table = Table("provenance", "Provenance", columns("what | value [sentence]"), rows, (*part.damage, *part.notes))
    return Section("provenance", "Where these numbers come from", (TableBlock(table, how=""),))


def _of_ranks(e: RanksExplanation | None) -> dict[str, Any]:
    if e is None:
        return {}
    read = {"traces": f"{e.name}, {len(e.ranks)} ranks", "profiler": e.source, "GPU": e.gpu}
    return read | {"left out, or missing": "; ".join(e.notes)}


def _environment(there: Environment) -> dict[str, Any]:
    gpu = there.gpu
    return {
        "GPU": f"{gpu.name}, {units.size(gpu.memory_bytes)}, {gpu.sm_count} SMs" if gpu else "none: the CPU",
        "driver": gpu.driver if gpu else "",
        "CPU": f"{there.cpu}, {there.cpu_cores} cores, torch uses {there.cpu_threads}" if there.cpu else "",
        "torch": there.torch,
        "CUDA": there.cuda,
        "Triton": there.triton,
        "Python": there.python,
        "flopwise, when measured": there.flopwise,
        "system": there.os,
        "commit": f"{there.git_commit}{' with changes' if there.git_dirty else ''}" if there.git_commit else "",
        "switches": ", ".join(f"{k}={v}" for k, v in there.switches.items()),
    }


# A new kind of evidence is a field of ReportPart and a function here.
SECTIONS: tuple[Callable[[ReportPart], Section | None], ...] = (
    *(_ranks, _findings, _collectives, _waterfall, _pairs, _gpu_time, _host_time, _timeline, _roofline, _memory),
    *(_measured, _predicted, _kernels, provenance),
)
