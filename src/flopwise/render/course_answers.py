"""The course's five questions answered in sentences: of one trace by its numbers, of several by their range."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from flopwise import units
from flopwise.analysis.course import AGREE, HOST, CourseReport, CourseTrace, why
from flopwise.analysis.shares import Kernel
from flopwise.render.names import short_name, short_paths, unique_names
from flopwise.work.operation import MATMUL

_NAME = 44  # letters of a kernel's name in a sentence


def answers(report: CourseReport) -> dict[str, str]:
    """Question (a) to (e), each in one to three sentences."""
    told = [one for one in report.traces if one.told]
    if not told:
        return _unknown(report.traces)
    if len(report.traces) == 1:
        (only,) = told
        return {"a": _forward(only), "b": _top(only), "c": _others(only), "d": _matmul(only), "e": _softmax(only)}
    out = len(report.traces) - len(told)
    some = f" {out} of {len(report.traces)} traces are in no answer: CUDA graphs hide what is forward." if out else ""
    return {
        "a": _forwards(told) + some,
        "b": _tops(told),
        "c": _others_of(told),
        "d": _matmuls(told),
        "e": _softmaxes(told),
    }


def _unknown(traces: Sequence[CourseTrace]) -> dict[str, str]:
    """Where most work is replayed and its phase is not known: why, and the shares of the whole step, which are."""
    share = _range((one.unknown_share for one in traces), lambda some: units.percent(some, 0))
    why_not = (
        f"Unknown: {share} of the GPU time comes from CUDA graphs, and nothing says which of it is the forward pass. "
        "A trace of their capture would, beside this one and with 'capture' in its name."
    )
    kinds: dict[str, list[float]] = {MATMUL: [0.0] * len(traces)}
    for place, one in enumerate(traces):
        for kind, part in one.classes_step.items():
            kinds.setdefault(kind, [0.0] * len(traces))[place] = part
    shares = {kind: _range(parts, lambda part: units.percent(part, 0)) for kind, parts in kinds.items()}
    largest = sorted((kind for kind in kinds if kind != MATMUL), key=lambda kind: -max(kinds[kind]))[:3]
    others = ", ".join(f"{kind} {shares[kind]}" for kind in largest)
    return {
        "a": why_not,
        "b": "Unknown, as (a).",
        "c": f"Unknown, as (a). Of the whole step's GPU time{f': {others}' if others else ' nothing but matmul is known'}.",
        "d": f"Matmul takes {shares[MATMUL]} of the whole step's GPU time; of the forward pass it is unknown.",
        "e": "Unknown, as (a).",
    }


def label(trace: CourseTrace) -> str:
    """What a trace is of, else its file's name."""
    return trace.model.label or short_paths([trace.path])[0]


def _forward(t: CourseTrace) -> str:
    if not t.forward_ns:
        return "No forward pass is found: no range 'forward', and no op that autograd recorded."
    span = units.duration(t.forward_span_ns)
    found = f"The forward pass is {units.duration(t.forward_ns)} of GPU work; traced, {span} pass from first kernel to last."
    if t.untraced is None or t.untraced.forward_ns is None:
        return f"{found} No time without a profiler is known: --csv gives one."
    clock = f"{units.duration(t.untraced.forward_ns)} without a profiler ({t.untraced.source})"
    verb = "agrees" if t.disagreement == AGREE else "differs"
    return f"{found} The clock says {clock}, which {verb}: {why(t)}."


def _kernel(kernel: Kernel, of_ns: float, names: Mapping[str, str]) -> str:
    share = f", {units.percent(kernel.gpu_ns / of_ns, 0)}" if of_ns else ""
    return f"{names[kernel.name]} ({units.several(kernel.count, 'launch')}, {units.duration(kernel.gpu_ns)}{share})"


def _told_apart(kernels: Iterable[Kernel | None]) -> dict[str, str]:
    """Short names of the kernels in one sentence; longer ones where two would look the same."""
    names = {one.name: short_name(one.name, _NAME) for one in kernels if one is not None}
    return names if len(set(names.values())) == len(names) else unique_names(names)


def _top(t: CourseTrace) -> str:
    if t.top_forward is None:
        return "No kernel of a forward pass is found."
    names = _told_apart((t.top_forward, t.top_backward, t.top_both))
    found = f"Forward: {_kernel(t.top_forward, t.forward_ns, names)}."
    if t.top_backward is None or t.top_both is None:
        return f"{found} The trace has no backward pass."
    same = "the same as forward's" if t.top_both.name == t.top_forward.name else "backward's"
    both = same if t.top_both.name in (t.top_forward.name, t.top_backward.name) else _kernel(t.top_both, 0.0, names)
    return f"{found} Backward alone: {_kernel(t.top_backward, t.backward_ns, names)}. Both together: {both}."


def _others(t: CourseTrace) -> str:
    if not t.others:
        return "Besides matmul no kernel is in the forward pass."
    listed = ", ".join(
        f"{short_name(one.name, _NAME)} {units.duration(one.gpu_ns)} ({units.percent(one.share)})"
        for one in t.others[:3]
    )
    rest = 1 - (t.matmul_forward or 0.0)
    return f"{units.percent(rest, 0)} of the pass is no matmul, most of all {listed}."


def _matmul(t: CourseTrace) -> str:
    if t.matmul_forward is None:
        return "No forward pass is found."
    share = units.percent(t.matmul_forward, 0)
    if t.matmul_step is None:
        return f"Matmul takes {share} of the GPU time in inference. A trace of training is not given."
    step = units.percent(t.matmul_step, 0)
    others = [f"{kind} {units.percent(s, 0)}" for kind, s in t.classes_step.items() if kind != MATMUL][:3]
    found = f"Matmul takes {share} of the forward pass's GPU time and {step} of the training step's"
    return f"{found}; the rest of that: {', '.join(others)}."


def _softmax(t: CourseTrace) -> str:
    a = t.attention
    if a.fused_ns and not a.softmax_ns:
        return f"Attention is fused: {units.duration(a.fused_ns)} in one kernel a layer, softmax and matmuls together."
    if a.time_ratio is None:
        return "No softmax or no product inside attention is found: are there ranges or modules that name attention?"
    found = f"Softmax takes {units.duration(a.softmax_ns)}, attention's two matmuls {units.duration(a.matmul_ns)}: "
    found += f"{a.time_ratio:.1f} times as long"
    if a.flops_ratio is not None:
        found += f", for 1/{a.flops_ratio:.0f} of the FLOPs (by {a.flops_by}); it is limited by memory"
    apart = f" The output projection, apart, takes {units.duration(a.projection_ns)}." if a.projection_ns else ""
    return f"{found}.{apart}"


def _range(values: Iterable[float], shown: Callable[[float], str]) -> str:
    """
    >>> _range([0.5, 0.25], lambda share: units.percent(share, 0))
    '25 % to 50 %'
    """
    found = sorted(values)
    texts = (shown(found[0]), shown(found[-1]))
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _forwards(traces: Sequence[CourseTrace]) -> str:
    some = [t for t in traces if t.forward_ns]
    if not some:
        return "No trace has a forward pass that can be told."
    found = f"The forward pass is {_range((t.forward_ns for t in some), units.duration)} of GPU work."
    timed = [t for t in some if t.ratio is not None]
    if not timed:
        return f"{found} No time without a profiler is known: --csv gives them."
    agree, waits = (sum(t.disagreement == kind for t in timed) for kind in (AGREE, HOST))
    most = max(timed, key=lambda t: t.ratio or 0.0)
    others = len(timed) - agree - waits
    parts = [f"{agree or 'none'} agree"]
    parts += [f"in {waits} the GPU waits for the host"] if waits else []
    parts += [f"{others} differ otherwise"] if others else []
    found += f" Of {len(timed)} times without a profiler {'; '.join(parts)}."
    return f"{found} Longest of all: {label(most)}, {most.ratio:.1f} times the GPU's work."


def _tops(traces: Sequence[CourseTrace]) -> str:
    some = [t for t in traces if t.top_forward is not None]
    matmul = sum(t.top_forward.kind == MATMUL for t in some if t.top_forward is not None)
    found = f"The longest kernel of forward is a matmul in {matmul} of {len(some)} traces."
    both = [t for t in some if t.top_both is not None and t.top_backward is not None]
    if not both:
        return f"{found} No trace has a backward pass."
    same = sum(t.top_both.name == t.top_forward.name for t in both if t.top_both and t.top_forward)
    backward = sum(t.top_backward.kind == MATMUL for t in both if t.top_backward)
    return (
        f"{found} Of backward alone it is one in {backward} of {len(both)}; of both together it is forward's own kernel in "
        f"{same} of {len(both)}."
    )


def _others_of(traces: Sequence[CourseTrace]) -> str:
    kinds: dict[str, list[float]] = {}
    for trace in traces:
        for kind, share in trace.classes_forward.items():
            if kind != MATMUL:
                kinds.setdefault(kind, []).append(share)
    largest = sorted(kinds, key=lambda kind: -max(kinds[kind]))[:3]
    if not largest:
        return "Besides matmul no kernel is in the forward passes."
    parts = [f"{kind} {_range(kinds[kind], lambda share: units.percent(share, 0))}" for kind in largest]
    return f"Besides matmul, of the forward pass's GPU time: {'; '.join(parts)}."


def _matmuls(traces: Sequence[CourseTrace]) -> str:
    def percent(share: float) -> str:
        return units.percent(share, 0)

    forward = [t.matmul_forward for t in traces if t.trains and t.matmul_forward is not None]
    alone = [t.matmul_forward for t in traces if not t.trains and t.matmul_forward is not None]
    step = [t.matmul_step for t in traces if t.matmul_step is not None]
    parts = [
        f"{_range(shares, percent)} {of}"
        for shares, of in (
            (alone, "in inference"),
            (forward, "of training's forward pass"),
            (step, "of the whole step"),
        )
        if shares
    ]
    return f"Matmul's share of the GPU time: {'; '.join(parts)}." if parts else "No forward pass is found."


def _softmaxes(traces: Sequence[CourseTrace]) -> str:
    some = [t for t in traces if t.attention.time_ratio is not None]
    if not some:
        return "No trace has softmax and matmuls of attention apart."
    times = _range((t.attention.time_ratio or 0.0 for t in some), lambda ratio: f"{ratio:.1f}")
    found = f"Softmax takes {times} times as long as attention's two matmuls"
    ratios = [t.attention.flops_ratio for t in some if t.attention.flops_ratio is not None]
    if ratios:
        found += f", for 1/{_range(ratios, lambda ratio: f'{ratio:.0f}')} of their FLOPs; it is limited by memory"
    return f"{found}. The output projection is in neither."
