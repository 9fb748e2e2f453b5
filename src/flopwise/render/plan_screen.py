"""A plan on one screen: what the run takes, its layout, where a step's time goes, and the next best layouts."""

from flopwise import units
from flopwise.records.plan import Plan
from flopwise.records.planned import BUBBLE, EXCHANGED, IMBALANCE, LAUNCHES, MATMULS, PARTS, SLOWED, Planned
from flopwise.render.screen import IDLE, MOST_CHANGES, OTHER, PREDICTED, SPECIFIED, USEFUL, Change, Figure, Part, Screen
from flopwise.spec.layout import Layout

_KINDS = {MATMULS: USEFUL} | dict.fromkeys((*EXCHANGED, BUBBLE, LAUNCHES, SLOWED, IMBALANCE), IDLE)
_SHARDED = {"optimizer": "optimizer sharded", "gradients": "gradients sharded", "weights": "FSDP"}
_LIMITS = {"specified": "datasheet", "measured": "measured"}
_SAME = 0.003  # of a step: no difference
_NAMED, _LEAST_NAMED = 6, 0.02  # owners that are named: the largest, and of the peak


def plan_screen(p: Plan) -> Screen:
    """Of the best layout."""
    step = p.best.step
    shown = next_best(p)
    shown = shown if len(shown) < 2 or not p.notes else [shown[0], *shown[2:]]  # a note needs the room
    return Screen(
        title=f"{p.model}, {units.count(p.parameters)} parameters",
        where=f"{p.gpus:,} × {p.gpu.partition(' (')[0]}" if p.gpus > 1 else p.gpu,
        verdict=verdict(p),
        figures=_figures(p),
        parts_title=f"Where the {units.duration(1e9 * step.wall_s)} of a step go",
        parts=tuple(
            Part(name, 1e9 * step.parts[name], _KINDS.get(name, OTHER)) for name in PARTS if step.parts.get(name)
        ),
        paragraphs=(f"Layout: {in_words(p.best.layout, p)}", f"Memory: {memory_words(p)}"),
        changes_title="Next best layouts" if shown else "",
        changes=tuple(_other(one, p) for one in shown),
        notes=tuple(filter(None, (" ".join(p.notes), _rule(p), _searched(p)))),
        more=f"Limits: {_LIMITS.get(step.how, step.how)}. All tables: --full",
    )


def next_best(p: Plan) -> list[Planned]:
    """Two that fit and differ by something that matters; one that does not fit, where it would be faster."""
    fit = [one for one in p.others if one.memory.peak_bytes <= p.limit_bytes and not same(p.best, one)]
    faster = [
        one
        for one in p.others
        if one.memory.peak_bytes > p.limit_bytes and one.step.wall_s < (1 - _SAME) * p.best.step.wall_s
    ][:1]
    return [*fit[: MOST_CHANGES - 1], *faster]


def same(best: Planned, other: Planned) -> bool:
    """As fast, and but for one kind of ranks the same."""
    kinds = ("tensor", "context", "pipeline", "expert", "sharded")
    apart = sum(getattr(best.layout, name) != getattr(other.layout, name) for name in kinds)
    return apart <= 1 and other.step.wall_s <= (1 + _SAME) * best.step.wall_s


def verdict(p: Plan) -> str:
    """What the run takes, as far as its tokens and a price are given."""
    rate = units.count(p.batch * p.context / p.step_s)
    if p.days is None or p.gpu_hours is None or p.tokens is None:
        if p.price is not None:
            hourly = f"{money(p.gpus * p.price)} an hour at ${p.price:g} a GPU"
            return f"{rate} tokens/s, {hourly}. Days, GPU-hours and money of a run: add --tokens 15T."
        return f"{rate} tokens/s. Days, GPU-hours and money: add --tokens 15T --price 2.5."
    cost = f", {money(p.cost)} at ${p.price:g} an hour" if p.cost is not None else ""
    used = _count(p.gpu_hours)
    hours = f"{used} GPU-hours{cost}"
    words = f"{units.count(p.tokens)} tokens take" if p.tokens != 1 else "1 token takes"
    return f"{words} {units.days(p.days)}: {hours}. {rate} tokens/s."


def money(dollars: float) -> str:
    """
    >>> money(53_400_000), money(125), money(2.5), money(0.0), money(1e-9)
    ('$53.4M', '$125', '$2.50', '$0', 'less than $0.01')
    """
    return _count(dollars, "$")


def _count(value: float, unit: str = "") -> str:
    """Of hours or dollars: three digits, and none of what rounds to nothing."""
    if 0 < value < 0.01:
        return f"less than {unit}0.01"
    return f"{unit}{units.count(value) if value >= 100 or not value else units.significant(value)}"


def _figures(p: Plan) -> tuple[Figure, ...]:
    step = p.best.step
    behind = sum(step.hidden_s.values())
    first = Figure("step", 1e9 * step.wall_s, PREDICTED, step.mfu, f"{units.count(step.tokens_s_gpu)} tokens/s a GPU")
    exchange = Figure("exchange", 1e9 * p.exposed_s, PREDICTED, None, f"exposed; {units.duration(1e9 * behind)} hidden")
    given = Figure("as given", 1e9 * p.step_s, SPECIFIED, p.mfu_given, "days by this MFU")
    return (first, *([exchange] if p.gpus > 1 else []), *([given] if p.mfu_given else []))


def in_words(layout: Layout, p: Plan) -> str:
    """Ranks first, then what each of them does."""
    micro = p.batch // (layout.data * layout.micro_batch)
    sequences = f"{p.batch:,} sequences of {p.context:,} a step in {units.several(micro, 'micro-batch')} of {layout.micro_batch}"
    return f"{short(layout)}; {sequences}; recompute {layout.recompute}; {layout.precision}, {layout.software}."


def short(layout: Layout) -> str:
    """The ranks in a few words.

    >>> short(Layout(data=64, tensor=8, pipeline=16, virtual=8, schedule="interleaved", sharded="optimizer"))
    'data 64 (optimizer sharded), tensor 8, pipeline 16 (8 parts each)'
    >>> short(Layout(data=8, sharded="weights", shard_ranks=4))
    'data 8 (FSDP in groups of 4)'
    """
    sharded = _SHARDED.get(layout.sharded, "")
    sharded += f" in groups of {layout.shard_ranks}" if layout.shard_ranks else ""
    stages = {"interleaved": f"{layout.virtual} parts each", "zero-bubble": "zero-bubble"}.get(layout.schedule, "")
    ranks = (
        ("data", layout.data, sharded if layout.data * layout.context > 1 else ""),
        ("tensor", layout.tensor, ""),
        ("context", layout.context, ""),
        ("pipeline", layout.pipeline, stages),
        ("expert", layout.expert, ""),
    )
    words = [f"{name} {n}{f' ({more})' if more else ''}" for name, n, more in ranks if n > 1]
    return ", ".join(words) or "one GPU"


def brief(layout: Layout) -> str:
    """As the options write it.

    >>> brief(Layout(data=64, tensor=8, pipeline=16, virtual=8, schedule="interleaved", sharded="optimizer"))
    'dp 64, tp 8, pp 16 × 8, optimizer sharded'
    """
    one = layout
    sizes = (("dp", one.data), ("tp", one.tensor), ("cp", one.context), ("pp", one.pipeline), ("ep", one.expert))
    parts = {"pp": f" × {one.virtual}" if one.virtual > 1 else ""}
    words = [f"{name} {size}{parts.get(name, '')}" for name, size in sizes if size > 1]
    sharded = _SHARDED.get(one.sharded, "") if one.data * one.context > 1 else ""
    groups = f" in groups of {one.shard_ranks}" if one.shard_ranks else ""
    return ", ".join(filter(None, (*words, f"{sharded}{groups}"))) or "one GPU"


def memory_words(p: Plan) -> str:
    """The peak, its limit, and who holds it."""
    peak = p.best.memory.peak_bytes
    owners = sorted(p.best.memory.owners.items(), key=lambda one: -one[1])[:_NAMED]
    named = [(name, size) for name, size in owners if size >= _LEAST_NAMED * peak]
    rest = peak - sum(size for _, size in named)
    words = ", ".join(
        f"{name} {size / 1e9:.1f}" for name, size in [*named, *([("others", rest)] if rest > 5e7 else [])]
    )
    return f"{peak / 1e9:.1f} of {p.limit_bytes / 1e9:.0f} GB on the fullest GPU: {words}."


def _other(one: Planned, p: Plan) -> Change:
    if one.memory.peak_bytes > p.limit_bytes:
        return Change(brief(one.layout), 0.0, shown=f"{units.duration(1e9 * one.step.wall_s)}, but {one.why}")
    more = units.percent(one.step.wall_s / p.best.step.wall_s - 1)
    return Change(brief(one.layout), 0.0, one.why, shown=f"{units.duration(1e9 * one.step.wall_s)} (+{more})")


def _rule(p: Plan) -> str:
    """The same MFU by both conventions."""
    if p.rule_days is None or p.days is None:
        return ""
    mfu = units.percent(p.mfu_given or p.best.step.mfu, 0)
    both = units.days(p.days), units.days(p.rule_days)
    alone = both[1].removesuffix(" days") if both[0].endswith(" days") else both[1]
    return f"At {mfu} MFU: {both[0]} with attention's FLOPs counted; {alone} by 6·N·D alone."


def _searched(p: Plan) -> str:
    return f"{p.cluster_title}; {p.fitting:,} of {p.tried:,} layouts fit. Nothing was run: all figures are predicted."
