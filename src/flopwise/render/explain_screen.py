"""An explained trace on one screen."""

from collections.abc import Sequence

from flopwise import units
from flopwise.advice.findings import CHANGE_THE_WORK, worth_most
from flopwise.analysis.explanation import UNDISTURBED, Explanation
from flopwise.analysis.reach import Reach
from flopwise.analysis.serving import IterationKind
from flopwise.analysis.verdict import CAPTURE
from flopwise.analysis.waterfall import PART_OF_CAUSE
from flopwise.records import waterfall as parts_of
from flopwise.records.finding import Finding
from flopwise.records.waterfall import Waterfall
from flopwise.render.actions import pytorch_line, what_to_do
from flopwise.render.names import short_paths
from flopwise.render.screen import (
    IDLE,
    MEASURED,
    NOW,
    OTHER,
    PREDICTED,
    USEFUL,
    WORTH_A_LINE,
    Change,
    Figure,
    Part,
    Screen,
    changes_title,
    reach_figures,
    sentence,
)
from flopwise.work.operation import COMMUNICATION
from flopwise.work.operation import OTHER as UNKNOWN_CLASS

# A waterfall's parts in the words of a legend; several may be one.
_LEGEND = {
    parts_of.ATTENTION_PART: ("attention", OTHER),
    parts_of.MEMORY_BOUND: ("memory-bound ops", OTHER),
    parts_of.BELOW_BANDWIDTH: ("memory-bound ops", OTHER),
    parts_of.FP8_CASTS: ("fp8 casts and scales", OTHER),
    parts_of.RECOMPUTATION: ("recomputation", OTHER),
    parts_of.OPTIMIZER_PART: ("optimizer", OTHER),
    parts_of.EXPOSED_COMMUNICATION: ("communication", OTHER),
    parts_of.TRANSFERS: ("host-device copies", OTHER),
    parts_of.IDLE_LAUNCH: ("idle: late launches", IDLE),
    parts_of.IDLE_SYNCHRONISATION: ("idle: host waits", IDLE),
    parts_of.IDLE_INPUT: ("idle: input data", IDLE),
    parts_of.IDLE_HOST: ("idle: host code", IDLE),
    parts_of.IDLE_COMPILATION: ("idle: compilation", IDLE),
    parts_of.IDLE_ALLOCATOR: ("idle: allocation", IDLE),
    parts_of.IDLE_OTHER: ("idle: other", IDLE),
}
_MATMUL = (*(parts_of.MATMUL_SHAPE, parts_of.MATMUL_UNALIGNED), *(parts_of.MATMUL_PRECISION, parts_of.MATMUL_OTHER))
_MOVING = (parts_of.MEMORY_BOUND, parts_of.BELOW_BANDWIDTH)
_UNKNOWN = ("unknown kernels", OTHER)
_APART = 1.1  # a mean over its median: further apart, both are said
ADVICE = "Nothing to change in an iteration itself; advice on serving is below."
NOTHING = "Nothing to change: no rule found a saving worth its effort."


def explanation_screen(e: Explanation) -> Screen:
    """The verdict, three numbers, the waterfall and the changes worth most."""
    best, found = worth_most(e.findings or ()), e.reach or Reach(now_ns=e.step_ns)
    return Screen(
        title=f"{e.subject or short_paths([e.path])[0]}: {e.source} trace",
        where=_where(e),
        verdict=f"{e.verdict[:1].upper()}{e.verdict[1:]}.",
        figures=(now(e, found), *reach_figures(found)),
        parts_title=f"Where the {units.duration(e.step_ns)} go",
        parts=waterfall_parts(e.waterfall) if e.waterfall is not None else _class_parts(e),
        changes_title=changes_title(len(best)) if best or e.findings is None or e.bound == CAPTURE else _nothing(e),
        changes=changes_of(best),
        notes=tuple(
            filter(None, (*serving_notes(e), slowed(e), *together_notes(e), *map(sentence, e.notes), varying(e)))
        ),
    )


def _where(e: Explanation) -> str:
    """The GPU, and which one of several; said here, where nothing is left out for want of room."""
    gpu = e.named_gpu or e.gpu
    if not e.named_gpu and "gpu_by_size" in e.note_keys:
        gpu += " (by size)"
    if e.together is None:
        return gpu
    if e.together.worked > 1:
        return ", ".join(filter(None, (f"device {e.device} of {e.together.worked}", gpu)))
    return f"{gpu or 'a GPU'}, 1 of {len(e.devices)} processes"


def _nothing(e: Explanation) -> str:
    return ADVICE if e.serving is not None and any(one.rule in CHANGE_THE_WORK for one in e.findings or ()) else NOTHING


def serving_notes(e: Explanation) -> tuple[str, ...]:
    """What a server's iterations did, a line for each kind, the bytes behind the limit of decoding, and advice."""
    if e.serving is None:
        return ()
    lines = [_iterations(one) for one in e.serving.kinds]
    if (token_ns := e.serving.output_token_ns) is not None:
        mean_ns = e.serving.output_token_mean_ns or 0.0
        mean = f", {units.duration(mean_ns)} on average" if mean_ns > _APART * token_ns else ""
        lines[-1] += f" An output token takes {units.duration(token_ns)}{mean}."
    if e.serving.weights_bytes is not None:
        cache = f" and {units.size(e.serving.decode_cache_bytes)} of cache" if e.serving.decode_cache_bytes else ""
        lines.append(f"An iteration reads {units.size(e.serving.weights_bytes)} of weights{cache}.")
    lines += [f"Advice: {what_to_do(one)}: {one.title}." for one in e.findings or () if one.rule in CHANGE_THE_WORK]
    return tuple(lines)


def _iterations(one: IterationKind) -> str:
    tokens = f", {one.prefill_tokens:,.0f} tokens of prompts" if one.prefill_tokens else ""
    cached = f", {one.context_tokens:,.0f} tokens in their cache" if one.context_tokens else ""
    rate = f", {units.count(one.tokens_per_s)} tokens/s" if one.tokens_per_s else ""
    requests = f"{one.requests:.3g}" if one.requests < 1000 else units.count(one.requests)
    number = f"{units.several(one.count, 'iteration')} of {requests} request{'' if one.requests == 1 else 's'}"
    return f"{one.kind.capitalize()}: {number}{tokens}{cached}: {units.duration(one.ns)}{rate}."


def together_notes(e: Explanation) -> tuple[str, ...]:
    """What several devices tell together, and how to see each."""
    if e.together is None:
        return ()
    shortest, longest = map(units.duration, (e.together.shortest_ns, e.together.longest_ns))
    take = f"take {shortest} to {longest} for a traced step" if shortest != longest else f"take {shortest} each, traced"
    several, n = len({one.device for one in e.devices}) > 1, e.together.devices
    who = f"{n} devices" if several and n >= e.together.worked else f"The {n} busiest of {e.together.worked} devices"
    who = who if several else f"{n} processes on one device"
    waits = e.together.describe()
    return (
        f"{who} {take}; {'--device N explains another, ' if several else ''}--full lists all.",
        *([f"{waits[:1].upper()}{waits[1:]}."] if waits else []),
    )


def now(e: Explanation, found: Reach) -> Figure:
    """The step as it is: untraced where that was measured or can be estimated, else as traced."""
    how, note, step = MEASURED, "traced; a profiler slows the CPU", e.untraced_step
    if step is not None:
        low, high = units.duration(step.low_ns), units.duration(step.high_ns)
        note = "without a profiler" if step.measured else "untraced as traced"
        if not step.measured and low != high:
            how, note = PREDICTED, f"untraced, {low} to {high}"
    return Figure(NOW, e.step_ns, how, found.mfu(e.step_ns), note)


def slowed(e: Explanation) -> str:
    """What the profiler did to the step, where that is much."""
    if e.window_ns <= (1 + UNDISTURBED) * e.step_ns:
        return ""
    return f"Traced, the step takes {units.duration(e.window_ns)}: the profiler slows the CPU."


def varying(e: Explanation) -> str:
    """How far apart the steps are, where some are far from the others."""
    found = e.step_spread
    if found is None or not found.outliers:
        return ""
    median, low, high = map(units.duration, (found.median_ns, found.shortest_ns, found.longest_ns))
    return f"Traced, {found.steps} steady steps take {low} to {high}, median {median}."


def changes_of(best: Sequence[Finding]) -> tuple[Change, ...]:
    """Findings with what they still save and the line that does it."""
    return tuple(Change(what_to_do(one), one.counted_ns or 0.0, pytorch_line(one.levers, one.code)) for one in best)


def waterfall_parts(found: Waterfall) -> tuple[Part, ...]:
    """The parts in the order of a waterfall, those of one name added up; kernels of unknown kind are not called memory-bound."""
    whole = sum(part.ns for part in found.parts)
    matmul = "matmul beyond that" if found.ns(parts_of.IDEAL) >= WORTH_A_LINE * whole else "matmul"
    beyond = sum(found.ns(name) for name in _MATMUL)
    useful = (_useful(found, min(beyond, 0.0)), USEFUL)
    # Matmuls that beat the rate of the ideal have nothing beyond it: their own rate is shown.
    of_matmul = useful if beyond < 0 else (matmul, OTHER)
    legend = _LEGEND | {parts_of.IDEAL: useful} | dict.fromkeys(_MATMUL, of_matmul)
    sums: dict[tuple[str, str], float] = {}
    for part in found.parts:
        unknown = part.by_class.get(UNKNOWN_CLASS, 0.0) if part.name in _MOVING else 0.0
        named = legend.get(part.name, (part.name, OTHER))
        sums[named] = sums.get(named, 0.0) + part.ns - unknown
        if unknown:
            sums[_UNKNOWN] = sums.get(_UNKNOWN, 0.0) + unknown
    return tuple(Part(name, ns, kind) for (name, kind), ns in sums.items())


def _useful(found: Waterfall, beaten_ns: float) -> str:
    """The ideal with its rate, which is below the datasheet's, that the limit is at; `beaten_ns`: how far they beat it."""
    ideal = found.ns(parts_of.IDEAL)
    if found.peak_share is None or ideal + beaten_ns <= 0:
        return f"useful FLOPs in {found.precision}" if found.precision else "useful FLOPs"
    share = found.peak_share * ideal / (ideal + beaten_ns)
    rate = f", {units.percent(share, 0)} peak" if share < 0.995 else " above peak"  # which no GPU of this kind does
    return f"{found.precision} FLOPs{rate}"


def _class_parts(e: Explanation) -> tuple[Part, ...]:
    """Without known limits: GPU time by class, and idle time by cause."""
    idle: dict[str, float] = {}
    for cause, ns in (e.untraced_idle or e.idle).by_cause_ns.items():
        name = _LEGEND[PART_OF_CAUSE.get(cause, parts_of.IDLE_OTHER)][0]
        idle[name] = idle.get(name, 0.0) + ns / e.steady_steps
    waiting = tuple(Part(name, ns, IDLE) for name, ns in idle.items() if ns)
    return (*(Part(name, ns) for name, ns in _counted_once(e).items()), *waiting)


def _counted_once(e: Explanation) -> dict[str, float]:
    """GPU time by class without what ran at the same time as other work: communication's, or else a share of each."""
    spent = {share.name: share.gpu_ns for share in e.classes}
    if (alone := spent.get(COMMUNICATION, 0.0) - e.overlap_ns) >= 0:
        return {f"{name} alone" if name == COMMUNICATION else name: ns for name, ns in spent.items()} | (
            {f"{COMMUNICATION} alone": alone} if COMMUNICATION in spent else {}
        )
    return {name: ns * e.busy_ns / max(e.gpu_ns, 1) for name, ns in spent.items()}
