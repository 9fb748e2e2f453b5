"""A training: its rows as a table, its answer on one screen, its curves."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from flopwise import units
from flopwise.analysis.training import Progressed, mfu, moves, progressed
from flopwise.records.table import Table
from flopwise.records.training import FAILED, FINISHED, GPU, LAUNCHING, LOADER, STALLED, Steps, Training
from flopwise.render import chart_style as style
from flopwise.render.charts import altair
from flopwise.render.json import document
from flopwise.render.screen import LIMIT, MEASURED, NOW, SPECIFIED, Figure, Part, Screen
from flopwise.render.table import View, columns

ROWS = "steps"
_HEADING = (
    "step | loss [number] | evaluation: held out [number] | tokens_per_s: tokens/s [count] | mfu | step_ns: step [ms] | "
    "waited_share: waits for data [percent] | launched_ns: launching [ms] | gpu_ns: GPU [ms] | rate | norm [number] | "
    "memory_bytes: memory | limited_by: limited by"
)
_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 60  # columns of the loss's curve
_MOST_DRAWN = 1500  # points of a curve
_WHY = {
    LOADER: "The loader stalls",
    LAUNCHING: "The host's launching is the limit: --graph on or --compile default have fewer launches",
    GPU: "The GPU is the limit",
}


def train_view(training: Training) -> View:
    """A row of the table for every row of the log."""
    table = Table(ROWS, training.headline(), columns(_HEADING), tuple(_rows(training)))
    found = progressed(training)
    content = document(
        "train", run=training.path.name, begun=training.begun, status=training.status, reason=training.reason or None
    )
    rows = [msgspec.to_builtins(row) for row in training.steps]
    return View([table], content | {"summary": msgspec.to_builtins(found), "steps": rows})


def train_screen(training: Training) -> Screen:
    """What was learnt, how long a step takes beside its limit, and what it waits for."""
    found, work, begun = progressed(training), training.header.trials[0].workload, training.begun
    gpu = begun.environment.gpu if begun.environment is not None else None
    figures = []
    if found.step_ns is not None:
        figures.append(Figure(NOW, found.step_ns, MEASURED, found.mfu, "median, with loader and logging"))
    if found.limit_ns is not None:
        figures.append(Figure(LIMIT, found.limit_ns, SPECIFIED, 1.0, f"its FLOPs at {_peak(training)}"))
    return Screen(
        title=work.label(),
        where=gpu.name if gpu is not None else begun.device,
        verdict=_verdict(training, found),
        figures=tuple(figures),
        parts_title="Where a step goes" if found.step_ns is not None and found.waited > STALLED else "",
        parts=_parts(found) if found.waited > STALLED else (),
        paragraphs=tuple(_curves(training)),
        notes=tuple(_notes(training, found)),
    )


def _verdict(training: Training, found: Progressed) -> str:
    done, asked = training.last_step, training.begun.settings.steps
    words = [f"{'Trained' if training.status == FINISHED else 'Not finished'}: no step was taken."]
    if found.first_loss is not None and found.last_loss is not None:
        verb = "fell" if found.last_loss < found.first_loss else "rose"
        fell = f"the loss {verb} from {found.first_loss:.2f} to {found.last_loss:.2f}"
        words = [f"Trained: {fell} in {done:,} steps."]
        if training.status != FINISHED:
            why = f": {training.reason}" if training.status == FAILED else ""
            words = [f"{training.status.capitalize()} after step {done:,} of {asked:,}{why}; {fell}."]
    if found.evaluation is not None:
        words.append(f"On held-out text it is {found.evaluation:.2f}.")
    if found.limited_by in _WHY:
        share = f": {units.percent(found.waited)} of a step waits for data" if found.limited_by == LOADER else ""
        words.append(f"{_WHY[found.limited_by]}{share}.")
    return " ".join(words)


def _peak(training: Training) -> str:
    work = training.header.trials[0].workload
    return f"{units.rate(training.begun.peak_flops_s or 0.0, 'FLOP/s')} {work.recipe.linear}"


def _parts(found: Progressed) -> tuple[Part, ...]:
    step_ns = found.step_ns or 0.0
    return (
        Part("the step's work", step_ns * (1 - found.waited)),
        Part("waiting for data", step_ns * found.waited, "idle"),
    )


def _curves(training: Training) -> list[str]:
    losses = [loss for row in training.steps for loss in row.losses if loss is not None]
    return [f"loss  {sparkline(losses)}"] if len(losses) > 1 else []


def sparkline(values: Sequence[float], width: int = _SPARK) -> str:
    """A curve in one line of text, by the logarithm where all are above zero.

    >>> sparkline([8, 4, 2, 1])
    '█▆▃▁'
    """
    groups = (
        [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(min(width, len(values)))]
        if len(values) > width
        else [[value] for value in values]
    )
    means = [sum(group) / len(group) for group in groups if group]
    means = [one for one in means if math.isfinite(one)] or [1.0]
    most = max(map(abs, means)) or 1.0
    heights = [math.log(one) for one in means] if min(means) > 0 else [one / most for one in means]
    low, span = min(heights), (max(heights) - min(heights)) or 1.0
    return "".join(_BARS[round((height - low) / span * (len(_BARS) - 1))] for height in heights)


def _notes(training: Training, found: Progressed) -> list[str]:
    begun, settings = training.begun, training.begun.settings
    seen = training.tokens_per_step * training.last_step
    said = [
        f"{units.count(begun.parameters)} parameters; {units.count(seen)} tokens seen, {seen / max(1, begun.tokens):.2f} epochs"
    ]
    if found.tokens_per_s is not None:
        memory = f"; peak memory {units.size(found.memory_bytes)}" if found.memory_bytes is not None else ""
        said.append(
            f"{units.count(found.tokens_per_s)} tokens/s in {settings.world} process{'es' if settings.world > 1 else ''}{memory}"
        )
    said += moves(*training.before, begun)
    said.append(f"Stored in {training.path}")
    if training.status != FINISHED:
        said.append(f"Go on: flopwise train --resume {training.path.name}")
    return said


def _rows(training: Training) -> list[dict[str, Any]]:
    return [_row(training, row) for row in training.steps if row.losses]


def _row(training: Training, row: Steps) -> dict[str, Any]:
    count = len(row.losses)
    step_ns = row.wall_ns / count
    norms = [norm for norm in row.norms if norm is not None]
    return {
        "step": row.step,
        "loss": None if math.isnan(row.loss) else row.loss,
        "evaluation": row.evaluation,
        "tokens_per_s": training.tokens_per_step / step_ns * 1e9 if step_ns else None,
        "mfu": mfu(training.begun_at(row.step), step_ns),
        "step_ns": step_ns,
        "waited_share": row.waited_ns / row.wall_ns if row.wall_ns else 0.0,
        "launched_ns": row.launched_ns / count,
        "gpu_ns": row.gpu_ns / count if row.gpu_ns is not None else None,
        "rate": f"{row.rate:.3g}",
        "norm": sum(norms) / len(norms) if norms else None,
        "memory_bytes": row.memory_bytes,
        "limited_by": row.limited_by,
    }


def loss_rows(training: Training) -> list[dict[str, Any]]:
    """Points of the curves: every step's loss, thinned out where there are very many, and those of the held-out text."""
    known = [
        {"step": row.step - len(row.losses) + 1 + place, "loss": loss, "of": "training"}
        for row in training.steps
        for place, loss in enumerate(row.losses)
        if loss is not None
    ]
    thin = known[:: len(known) // _MOST_DRAWN + 1]
    held = [
        {"step": row.step, "loss": row.evaluation, "of": "held out"}
        for row in training.steps
        if row.evaluation is not None
    ]
    return [*thin, *held]


def speed_rows(training: Training) -> list[dict[str, Any]]:
    return [
        {"step": row["step"], "tokens_per_s": row["tokens_per_s"], "limited_by": row["limited_by"] or "the CPU"}
        for row in _rows(training)[1:]
    ]


def loss_chart(rows: Sequence[dict[str, Any]]) -> Any:
    """Loss over steps, both on their axes as they are."""
    alt = altair()
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("loss:Q", title="loss, nats a token", scale=alt.Scale(type="log", nice=False)),
        color=alt.Color(
            "of:N", title=None, scale=alt.Scale(domain=["training", "held out"], range=[style.SAMPLE, style.INTERVAL])
        ),
        tooltip=[alt.Tooltip("of:N"), alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".4f")],
    )
    lines = base.mark_line(strokeWidth=1.2).transform_filter("datum.of == 'training'")
    held = base.mark_line(point=True).transform_filter("datum.of == 'held out'")
    return (lines + held).properties(width=style.WIDTH, height=style.HEIGHT)


def speed_chart(rows: Sequence[dict[str, Any]]) -> Any:
    """Tokens per second over steps, coloured by what they waited for."""
    alt = altair()
    return (
        alt.Chart(alt.Data(values=list(rows)))
        .mark_point(filled=True, size=28)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("tokens_per_s:Q", title="tokens per second", axis=alt.Axis(format="~s")),
            color=alt.Color("limited_by:N", title="limited by", scale=alt.Scale(range=list(style.SERIES))),
            tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("tokens_per_s:Q", format=".3s"), alt.Tooltip("limited_by:N")],
        )
        .properties(width=style.WIDTH, height=style.HEIGHT // 2)
    )
