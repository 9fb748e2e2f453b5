"""Which model a trace is of: by its run, by the sizes of its ops, by its file's name. With it, what its attention must do."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import polars as pl

from flopwise.analysis.traced_steps import TracedSteps
from flopwise.records.run import Point
from flopwise.spec.model import ModelSpec, preset, preset_names
from flopwise.trace.phases import FORWARD
from flopwise.work.catalogue import ATTENTION_LAYOUT
from flopwise.work.recorded import input_sizes
from flopwise.work.sized import ATTENTIONS, MATMULS, SOFTMAXES, factors

SOFTMAX_FLOPS = 5  # of an element: maximum, subtraction, exponential, sum, division
_NAMES = sorted(preset_names(), key=len, reverse=True)
_SIZE = re.compile(
    rf"(?<![a-z0-9.])({'|'.join(re.escape(name).replace(re.escape('.'), '[._p]?') for name in _NAMES)})(?![a-z0-9])",
    re.IGNORECASE,
)
_LENGTH = r"(?:[_-]?(?:len|length|size))?[_=-]?(\d{1,6})(?![0-9a-z]|\.\d)"
_CONTEXT = re.compile(rf"(?<![a-z0-9])(?:ctx|context|seq|sequence|t){_LENGTH}", re.IGNORECASE)
_BATCH = re.compile(rf"(?<![a-z0-9])(?:b|bs|batch){_LENGTH}", re.IGNORECASE)
_BARE = re.compile(r"(?<![0-9a-z.])(\d{2,6})(?![0-9a-z]|\.\d)", re.IGNORECASE)
_SHORTEST, _LONGEST = 64, 2**17  # of a context that a name has without saying what it is: a power of two


class TracedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the model and its input; None where it is not."""

    size: str = ""
    context: int | None = None
    batch: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    layers: int | None = None
    width: int | None = None  # of the residual stream

    @property
    def label(self) -> str:
        """
        >>> TracedModel(size="small", context=512).label, TracedModel().label
        ('small, context 512', '')
        """
        return ", ".join(filter(None, (self.size, f"context {self.context}" if self.context else "")))


class AttentionFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Of one forward pass, all layers, scores as whole squares."""

    matmul: float  # scores and values
    softmax: float
    projection: float  # of the result


def attention_flops(model: TracedModel) -> AttentionFlops | None:
    """FLOPs of attention by the model's sizes; None where one is not known.

    >>> found = attention_flops(TracedModel(context=512, batch=4, heads=12, head_dim=64, layers=12, width=768))
    >>> found.matmul == 12 * 4 * 12 * 4 * 512**2 * 64, found.matmul / found.softmax
    (True, 51.2)
    """
    context, batch, heads, head_dim, layers, width = (
        getattr(model, name) for name in ("context", "batch", "heads", "head_dim", "layers", "width")
    )
    if None in (context, batch, heads, head_dim, layers, width):
        return None
    scores = layers * batch * heads * context**2
    return AttentionFlops(
        matmul=4.0 * scores * head_dim,
        softmax=float(SOFTMAX_FLOPS * scores),
        projection=2.0 * layers * batch * context * heads * head_dim * width,
    )


def traced_model(part: TracedSteps, path: Path, point: Point | None, **given: int | None) -> tuple[TracedModel, str]:
    """The model, and a remark where its sources do not agree. `given`: `context`, `batch` as the user says them."""
    asked = {name: value for name, value in given.items() if value is not None}
    if point is not None and isinstance(spec := point.trial.workload.subject, ModelSpec):
        workload = point.trial.workload
        known = TracedModel(size=workload.target, context=workload.context, batch=workload.batch, **_sizes(spec))
        return known, ""
    named, shaped = named_model(path), _shaped(part)
    size = named.size or _preset_of(shaped)
    by_size = _sizes(preset(size)) if size else {}
    by_name = {name: value for name in ("context", "batch") if (value := getattr(named, name)) is not None}
    said = by_size | by_name | asked
    others = [name for name, value in said.items() if shaped.get(name, value) != value]
    differ = ", ".join(f"{name.replace('_', ' ')} {said[name]}, not {shaped[name]}" for name in others)
    remark = f"its ops' sizes count: its name or an option says {differ}" if others else ""
    return TracedModel(size=size, **(said | shaped)), remark


def named_model(path: Path | str) -> TracedModel:
    """Size, context and batch as a file is named, or the folder that it is in.

    >>> [named_model(name).label for name in ("small_ctx128.sqlite", "2.7B-t1024-train.json.gz", "x/xl_512/trace.json")]
    ['small, context 128', '2.7B, context 1024', 'xl, context 512']
    """
    size, context, batch = "", None, None
    for text in (Path(path).name, Path(path).parent.name):
        found = _SIZE.search(text)
        if not size and found:
            size = next(name for name in _NAMES if _letters(name) == _letters(found[1]))
        context = context or _first(_CONTEXT, text) or next(_bare_contexts(text), None)
        batch = batch or _first(_BATCH, text)
    return TracedModel(size=size, context=context, batch=batch)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]|(?<=\d)p(?=\d)", "", name.lower())


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[1]) or None if found else None


def _bare_contexts(text: str) -> Iterator[int]:
    for found in _BARE.finditer(text):
        number = int(found[1])
        if _SHORTEST <= number <= _LONGEST and number & (number - 1) == 0:
            yield number


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {"heads": spec.n_heads, "head_dim": spec.head_dim, "layers": spec.n_layers, "width": spec.d_model}


def _preset_of(shaped: dict[str, int]) -> str:
    """The first preset that has these heads and layers."""
    if "layers" not in shaped or "heads" not in shaped:
        return ""
    return next((name for name in preset_names() if shaped.items() <= (shaped | _sizes(preset(name))).items()), "")


class _Sized(msgspec.Struct, frozen=True):
    """An op of the forward pass with the sizes of its inputs, and how often it ran."""

    op: str
    sizes: list[list[int]]
    count: int

    @property
    def four(self) -> list[int]:
        """The sizes of its first input, if it has four."""
        return self.sizes[0] if self.sizes and len(self.sizes[0]) == 4 else []

    @property
    def is_scores(self) -> bool:
        """A batched product whose result is as wide as high."""
        pair = factors(self.op, self.sizes) if self.op in MATMULS else None
        return pair is not None and len(pair[0]) == 3 and pair[0][1] == pair[1][2] != pair[0][2]


def _shaped(part: TracedSteps) -> dict[str, int]:
    """What the sizes of the forward pass's ops tell: of fused attention, or of its softmax and its batched products."""
    forward = part.totals.filter(pl.col("phase") == FORWARD, pl.col("shape") > 0)
    ops = forward.group_by("op", "shape").agg(pl.col("ops").sum()).filter(pl.col("ops") > 0)
    rows = [
        _Sized(op, input_sizes(part.whole.shapes[shape]) or [], count)
        for op, shape, count in ops.sort("ops", "op", "shape", descending=True).iter_rows()
    ]
    if fused := next((row for row in rows if row.op in ATTENTIONS and row.four), None):
        batch, second, third, head_dim = fused.four
        by_head = ATTENTION_LAYOUT[fused.op.rpartition("::")[2]][1]
        heads, context = (second, third) if by_head else (third, second)
        return _known(part, batch, context, heads, head_dim, fused.count)
    scores = next((row for row in rows if row.is_scores), None)
    return _by_scores(part, rows, scores) if scores is not None else {}


def _by_scores(part: TracedSteps, rows: Sequence[_Sized], scores: _Sized) -> dict[str, int]:
    """The batch is that of the softmax, else what the tokens of the projections make of it."""
    many, context, head_dim = scores.sizes[0]
    squares = [row.four for row in rows if row.op in SOFTMAXES and row.four and row.four[-1] == context]
    tokens = [row.sizes[0][0] for row in rows if row.op in MATMULS and row.sizes and len(row.sizes[0]) == 2]
    batch = squares[0][0] if squares else tokens[0] // context if tokens and not tokens[0] % context else 0
    if not batch or many % batch:
        return {"context": context, "head_dim": head_dim}
    return _known(part, batch, context, many // batch, head_dim, scores.count)


def _known(part: TracedSteps, batch: int, context: int, heads: int, head_dim: int, count: int) -> dict[str, int]:
    layers = max(1, round(count / len(part.steps)))
    return {"batch": batch, "context": context, "heads": heads, "head_dim": head_dim, "layers": layers}
