"""In which phase of a training step each event of the allocator happened.

By the first of these that is known: the program's own label (user metadata), a named range around it, its stack, and that
PyTorch runs backward on a thread without Python: an event without a stack among events with stacks, after forward, is backward.
A stack refines what a range says: a loss inside forward, a recomputation inside backward.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flopwise.snapshot.snapshot import NO_STACK, Annotation, DeviceHistory, Flags, Frame, Ints, Snapshot
from flopwise.trace import phases as names
from flopwise.trace.phases import phase_of_range

NAMES = (names.FORWARD, names.LOSS, names.BACKWARD, names.RECOMPUTE, names.OPTIMIZER, "setup", "data")
NONE = -1
FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, SETUP, DATA = range(len(NAMES))
# Forward and loss are one pass, backward and its recomputation another: what lives within one of them is temporary.
_PASS = np.array([FORWARD, FORWARD, BACKWARD, BACKWARD, OPTIMIZER, SETUP, DATA, NONE])  # by phase; NONE is the last

_TORCH = r"(?:^|/)torch/"
_FRAMES = (  # phase, file and function of one frame
    (OPTIMIZER, _TORCH + r"(?:optim/|nn/utils/clip_grad\.py)", ""),
    (OPTIMIZER, "", r"^(?:optimizer_step|clip_grad\w*|zero_grad)$"),
    (RECOMPUTE, _TORCH + r"utils/checkpoint\.py$", r"^(?:unpack_hook|recompute_fn|backward)$"),
    (BACKWARD, _TORCH + r"(?:autograd/(?:graph|__init__)\.py|_tensor\.py)$", r"backward|^_make_grads$|^grad$"),
    (BACKWARD, _TORCH + r"_functorch/", "backward"),
    # C++ frames: the engine's thread, and a node's own
    (BACKWARD, "", r"torch::autograd::(?:Engine|Node|AccumulateGrad|generated::\w+Backward)|PyFunction::apply"),
    (LOSS, _TORCH + r"nn/(?:functional\.py|modules/loss\.py)$", "loss|entropy|nll|forward"),
    (LOSS, "", r"^(?:chunked_|compute_|fused_)?(?:cross_entropy|loss)(?:_fn|_function)?$"),
    (SETUP, _TORCH + r"nn/modules/module\.py$", r"^(?:_apply|to|cuda|half|bfloat16|to_empty|load\w*)$"),
    (SETUP, _TORCH + r"nn/(?:parameter|init|modules/\w+)\.py$", r"^(?:__(?:init|new)__|reset\w*|\w+_)$"),
    (SETUP, "", r"^(?:reset_parameters|_?init_weights)$"),
    (DATA, _TORCH + r"utils/data/", ""),
    (DATA, "", r"^(?:get_batch|next_batch|load_batch|\w*collate\w*|prefetch\w*|\w*to_device|pin_memory)$"),
    (FORWARD, _TORCH + r"nn/modules/", r"^_(?:wrapped_call_impl|call_impl)$|forward$"),
    (FORWARD, _TORCH + r"nn/functional\.py$", ""),
    (FORWARD, "", r"^forward$"),
)
_PATTERNS = tuple((phase, re.compile(file), re.compile(function)) for phase, file, function in _FRAMES)


@dataclass(frozen=True)
class Phases:
    """Per event: its own phase (NONE: not known), the phase it lies in, and the number of the pass it lies in."""

    own: Ints
    within: Ints  # its own, else the last one's before it
    run: Ints  # counts changes of `within`
    passes: Ints  # counts changes of pass: forward with loss, backward with recomputation

    @property
    def one_pass(self) -> Ints:
        """The pass an event lies in: FORWARD, BACKWARD, OPTIMIZER, SETUP, DATA or NONE."""
        return np.asarray(_PASS[self.within], dtype=np.int64)


def phase_name(code: int) -> str:
    """A phase's name; '' for none.

    >>> phase_name(4), phase_name(-1)
    ('optimizer', '')
    """
    return NAMES[code] if code >= 0 else ""


def phases(
    snapshot: Snapshot,
    device: DeviceHistory,
    by_stack: Ints,
    phase_of_label: Callable[[str], str | None] = phase_of_range,
) -> Phases:
    """The phase of every event of a device; `by_stack` is the phase of each stack, `phase_of_label` that of a label."""
    own = np.array([_code(phase_of_label(label)) for label in snapshot.hints])[device.event_hints]
    own = np.where(own == NONE, _refined(_ranged(device), by_stack[device.event_stacks]), own)
    if (own != NONE).any() and (device.event_stacks != NO_STACK).any():
        before, after = _carried(own), _carried(own[::-1])[::-1]
        begun = np.isin(before, (FORWARD, LOSS, BACKWARD, RECOMPUTE))
        in_backward = begun | ((before == NONE) & np.isin(after, (BACKWARD, RECOMPUTE, OPTIMIZER)))
        own = np.where((own == NONE) & _without_python(device) & in_backward, BACKWARD, own)
    within = _carried(own)
    return Phases(own=own, within=within, run=_runs(within), passes=_runs(_PASS[within]))


def stack_phases(snapshot: Snapshot) -> Ints:
    """The phase of each stack.

    The innermost frame that has one decides (a loss inside a model's forward is the loss); but a forward below backward
    or below the checkpoint's own functions is a recomputation.
    """
    roles = [frame_phase(frame) for frame in snapshot.frames]
    return np.array([_stack_phase([roles[i] for i in stack]) for stack in snapshot.stacks])


def frame_phase(frame: Frame) -> int:
    """The phase of one frame.

    >>> NAMES[frame_phase(Frame("/site-packages/torch/optim/adamw.py", 99, "_multi_tensor_adamw"))]
    'optimizer'
    """
    matches = (p for p, file, function in _PATTERNS if function.search(frame.name) and file.search(frame.file))
    return next(matches, NONE)


def _stack_phase(roles: Sequence[int]) -> int:
    known = [role for role in roles if role != NONE]
    if not known:
        return NONE
    inner = next((role for role in known if role != RECOMPUTE), RECOMPUTE)
    if inner in (FORWARD, LOSS) and (RECOMPUTE in known or BACKWARD in known):
        return RECOMPUTE
    return BACKWARD if inner == RECOMPUTE else inner


def _code(phase: str | None) -> int:
    return NAMES.index(phase) if phase in NAMES else NONE


def _ranged(device: DeviceHistory) -> Ints:
    """The innermost named range around each event that is named after a phase."""
    marks = [(mark, code) for mark in device.annotations if (code := _code(phase_of_range(mark.name))) != NONE]
    if device.time_us is None or not marks:
        return np.full(device.events, NONE)
    times, codes = _innermost(marks, int(device.time_us[0]), int(device.time_us[-1]) + 1)
    return np.asarray(codes[np.searchsorted(times, device.time_us, side="right") - 1])


def _refined(ranged: Ints, stacked: Ints) -> Ints:
    """The phase of the range; of the stack where there is no range, or where it is a part of the range's phase."""
    part = ((ranged == FORWARD) & (stacked == LOSS)) | ((ranged == BACKWARD) & (stacked == RECOMPUTE))
    return np.where((ranged == NONE) | part, stacked, ranged)


def _innermost(marks: Sequence[tuple[Annotation, int]], first_us: int, last_us: int) -> tuple[Ints, Ints]:
    """From which time on which phase holds: the latest begun that has not ended."""
    spans = [
        (first_us if m.start_us is None else m.start_us, last_us if m.end_us is None else m.end_us, p) for m, p in marks
    ]
    spans = sorted(span for span in spans if span[0] < span[1])
    times, codes, opened, i = [first_us - 1], [NONE], list[tuple[int, int]](), 0
    for moment in sorted({time for start, end, _ in spans for time in (start, end)}):
        while i < len(spans) and spans[i][0] <= moment:
            opened.append((spans[i][1], spans[i][2]))
            i += 1
        while opened and opened[-1][0] <= moment:
            opened.pop()
        times.append(max(moment, times[-1]))
        codes.append(opened[-1][1] if opened else NONE)
    return np.array(times), np.array(codes)


def _without_python(device: DeviceHistory) -> Flags:
    """Events without a stack; frees among them only where frees have stacks at all (context='all')."""
    none = device.event_stacks == NO_STACK
    ends = device.allocations["end"].to_numpy()
    ends = ends[ends < device.events]
    if not (device.event_stacks[ends] != NO_STACK).any():
        starts = device.allocations["start"].to_numpy()
        allocated = np.zeros(device.events, dtype=np.bool_)
        allocated[starts[starts >= 0]] = True
        none &= allocated
    return np.asarray(none)


def _carried(own: Ints) -> Ints:
    """Each unknown takes the last known before it."""
    known = np.where(own != NONE, np.arange(len(own)), 0)
    return np.asarray(own[np.maximum.accumulate(known)] if len(own) else own)


def _runs(values: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(values[1:] != values[:-1]))) if len(values) else values
