"""What the tools answer: fields with units in their names, lists of bounded length that say how much they leave out."""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from flopwise.render.visible import visible

LONGEST = 400  # characters of one text: a kernel's name may have thousands
DIGITS = 6


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer's base; msgspec makes the published schema from the fields."""


class RunRow(_Answer, frozen=True, kw_only=True):
    """A stored run."""

    id: str
    kind: str  # the verb that made it
    name: str
    created_at: str
    tags: tuple[str, ...]
    points_ok: int
    points_failed: int
    complete: bool
    size_bytes: int
    warnings: tuple[str, ...]


class Runs(_Answer, frozen=True, kw_only=True):
    """The stored runs, newest first."""

    runs: tuple[RunRow, ...]
    runs_left_out: int


class PhaseRow(_Answer, frozen=True, kw_only=True):
    """One phase of a measured step; medians."""

    phase: str
    wall_ns: float
    gpu_ns: float | None
    launch_ns: float | None
    samples: int


class PointRow(_Answer, frozen=True, kw_only=True):
    """One workload that was measured."""

    workload: str
    device: str
    status: str
    reason: str
    phases: tuple[PhaseRow, ...]
    peak_bytes: int | None
    mfu_share: float | None
    tokens_per_s: float | None


class RunPart(_Answer, frozen=True, kw_only=True):
    """What a run measured."""

    id: str
    kind: str
    created_at: str
    complete: bool
    points: tuple[PointRow, ...]
    points_left_out: int
    warnings: tuple[str, ...]


class TimeRow(_Answer, frozen=True, kw_only=True):
    """GPU time of one phase, class or module, per step."""

    name: str
    gpu_ns: float
    share: float
    kernels: float


class WaterfallRow(_Answer, frozen=True, kw_only=True):
    """One part from the ideal step to this one; the parts add up to the step."""

    part: str
    ns: float
    share: float
    obtained: str  # measured, predicted or specified


class TracePart(_Answer, frozen=True, kw_only=True):
    """Where the time of a traced step went."""

    file: str
    profiler: str
    gpu: str
    verdict: str
    launch_bound: bool
    steps: int
    step_ns: float  # untraced where that is measured or estimated, else as traced
    reachable_step_ns: float | None  # predicted: with all changes found that leave the training as it is
    limit_step_ns: float | None  # its FLOPs at the peak rate of the datasheet
    traced_step_ns: float
    untraced_step_ns: float | None  # measured, or estimated from the trace
    gpu_busy_ns: float
    idle_by_cause_ns: dict[str, float]  # of one step, as `step_ns` has it
    mfu_share: float | None
    phases: tuple[TimeRow, ...]
    classes: tuple[TimeRow, ...]
    modules: tuple[TimeRow, ...]
    modules_left_out: int
    waterfall: tuple[WaterfallRow, ...]
    findings: int  # the tool `findings` has them
    notes: tuple[str, ...]


class HostRow(_Answer, frozen=True, kw_only=True):
    """CPU time of one phase or module, per step."""

    name: str
    wall_ns: float
    outside_ops_ns: float
    share: float


class OpRow(_Answer, frozen=True, kw_only=True):
    """One op on the CPU, per step; its self time is without the ops that it calls."""

    name: str
    kind: str
    self_ns: float
    share: float
    count: float


class HostPart(_Answer, frozen=True, kw_only=True):
    """Where the CPU's time of a traced step went, where the trace has no GPU work; of one thread, so that it adds up."""

    file: str
    verdict: str
    bound: str  # data, python or ops
    steps: int
    traced_step_ns: float
    untraced_step_ns: float | None
    outside_ops_ns: float
    data_loading_ns: float
    phases: tuple[HostRow, ...]
    modules: tuple[HostRow, ...]
    modules_left_out: int
    ops: tuple[OpRow, ...]
    ops_left_out: int
    other_threads: int
    findings: int  # the tool `findings` has them
    notes: tuple[str, ...]


class Summary(_Answer, frozen=True, kw_only=True):
    """A run, a trace, or a run with its trace; a trace without GPU work is `host`."""

    run: RunPart | None = None
    trace: TracePart | None = None
    host: HostPart | None = None


class FindingRow(_Answer, frozen=True, kw_only=True):
    """One reason why a step is slow, and the change."""

    rule: str
    problem: str
    saving_ns: float  # predicted, by itself
    saving_with_those_above_ns: float | None  # predicted, with the changes listed before it already made
    saving_bytes: int
    how_computed: str
    evidence: tuple[str, ...]
    levers: dict[str, str]
    code_lines: tuple[str, ...]
    confidence: str


class Findings(_Answer, frozen=True, kw_only=True):
    """What to change, in the order to do it. Savings are predicted, not measured."""

    step_ns: float
    findings: tuple[FindingRow, ...]
    findings_left_out: int


class KernelRow(_Answer, frozen=True, kw_only=True):
    """One kernel, per step."""

    name: str
    kind: str
    gpu_ns: float
    share: float
    count: float
    mean_ns: float


class Kernels(_Answer, frozen=True, kw_only=True):
    """The kernels that take longest."""

    kernels: tuple[KernelRow, ...]
    kernels_left_out: int
    left_out_gpu_ns: float


class PairRow(_Answer, frozen=True, kw_only=True):
    """One workload of A and B; a ratio below 1 means that B takes less time."""

    a: str
    b: str
    ratio: float | None
    ratio_low: float | None  # 95 % interval
    ratio_high: float | None
    verdict: str
    reason: str
    what_would_settle_it: str


class ChangeRow(_Answer, frozen=True, kw_only=True):
    """One kernel in both traces, per step; a loss is a negative saving."""

    name: str
    kind: str
    before_ns: float
    after_ns: float
    saved_ns: float


class Compared(_Answer, frozen=True, kw_only=True):
    """Two runs by their measured times, or two traces kernel by kernel."""

    phase: str
    clock: str
    pairs: tuple[PairRow, ...] = ()
    pairs_left_out: int = 0
    damage: tuple[str, ...] = ()  # rows that are lost: the verdicts are of what is left
    different_environments: str = ""  # how the GPU, driver or torch of A and B differ: a ratio is of these, too
    only_a: int = 0
    only_b: int = 0
    step_before_ns: float | None = None
    step_after_ns: float | None = None
    kernels: tuple[ChangeRow, ...] = ()
    kernels_left_out: int = 0


class ModuleRow(_Answer, frozen=True, kw_only=True):
    """One module's ops of one class, of all layers, in one step."""

    module: str
    kind: str
    flops: int
    moved_bytes: int
    kernels: int


class TrainingRow(_Answer, frozen=True, kw_only=True):
    """A training run, predicted."""

    counted_by: str  # the rule for its FLOPs
    dtype: str  # of the peak rate
    days: float
    gpu_hours: float


class GpuRow(_Answer, frozen=True, kw_only=True):
    """The step on one GPU, predicted."""

    gpu: str
    memory_bytes: int | None
    peak_bytes: int
    fits: bool | None
    largest_batch: int | None
    largest_context_tokens: int | None
    least_step_ns: float | None  # by the datasheet
    predicted_step_ns: float | None
    predicted_mfu_share: float | None
    training: tuple[TrainingRow, ...]  # where tokens were given


class Accounted(_Answer, frozen=True, kw_only=True):
    """What a step costs, predicted; nothing was run."""

    workload: str
    parameters: int
    forward_flops: int | None
    backward_flops: int | None
    peak_bytes: int
    peak_by_owner_bytes: dict[str, int]
    modules: tuple[ModuleRow, ...]
    modules_left_out: int
    gpus: tuple[GpuRow, ...]
    notes: tuple[str, ...]


def content(answer: _Answer, shown: Callable[[str], str] = str) -> dict[str, Any]:
    """The answer as JSON's own types: texts from files shown, not done, and cut; numbers short and finite.

    `shown` is what becomes of a text before.

    >>> content(KernelRow(name="a\\x1b[2J", kind="", gpu_ns=1 / 3, share=math.nan, count=2.0, mean_ns=0.0))["gpu_ns"]
    0.333333
    """
    found: dict[str, Any] = _bounded(msgspec.to_builtins(answer), shown)
    return found


def _bounded(value: Any, shown: Callable[[str], str]) -> Any:
    match value:
        case str():
            return visible(shown(value), LONGEST).encode("utf-8", "backslashreplace").decode()
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        case dict():
            return {_bounded(key, shown): _bounded(inner, shown) for key, inner in value.items()}
        case list() | tuple():
            return [_bounded(inner, shown) for inner in value]
        case _:
            return value
