"""In which phase of a training step each event of the allocator happened.

What tells it, the first that does: the program's own word for it (user metadata), a named range around it, its stack, and that
PyTorch runs backward on a thread without Python: an event without a stack among events with stacks, after forward, is backward.
A stack refines what a range says: a loss inside forward, a recomputation inside backward.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.snapshot.snapshot import NO_STACK, Annotation, DeviceHistory, Frame, Snapshot
from flopwise.trace.phases import BACKWARD, FORWARD, LOSS, OPTIMIZER, RECOMPUTE, phase_of_range

SETUP, DATA = "setup", "data"
NAMES = (FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, SETUP, DATA)
NONE = -1
F, L, B, R, O, S, D = range(len(NAMES))  # noqa: E741  the phases' letters
# Forward and loss are one pass, backward and its recomputation another: what lives within one of them is temporary.
_PASS = np.array([F, F, B, B, O, S, D, NONE])  # indexed by phase; NONE is the last

_TORCH = r"(?:^|/)torch/"
_ROLES = (  # of one frame: file, name
    (O, re.compile(_TORCH + r"(?:optim/|nn/utils/clip_grad\.py)"), re.compile("")),
    (O, re.compile(""), re.compile(r"^(?:optimizer_step|clip_grad\w*|zero_grad)$")),
    (R, re.compile(_TORCH + r"utils/checkpoint\.py$"), re.compile(r"^(?:unpack_hook|recompute_fn|backward)$")),
    (B, re.compile(_TORCH + r"(?:autograd/(?:graph|__init__)\.py|_tensor\.py)$"), re.compile(r"backward|^_make_grads$|^grad$")),
    (B, re.compile(_TORCH + r"_functorch/"), re.compile("backward")),
    # C++ frames: the engine's thread, and a node's own
    (B, re.compile(""), re.compile(r"torch::autograd::(?:Engine|Node|AccumulateGrad|generated::\w+Backward)|PyFunction::apply")),
    (L, re.compile(_TORCH + r"nn/(?:functional\.py|modules/loss\.py)$"), re.compile("loss|entropy|nll|forward")),
    (L, re.compile(""), re.compile(r"^(?:chunked_|compute_|fused_)?(?:cross_entropy|loss)(?:_fn|_function)?$")),
    (S, re.compile(_TORCH + r"nn/modules/module\.py$"), re.compile(r"^(?:_apply|to|cuda|half|bfloat16|to_empty|load\w*)$")),
    (S, re.compile(_TORCH + r"nn/(?:parameter|init|modules/\w+)\.py$"), re.compile(r"^(?:__(?:init|new)__|reset\w*|\w+_)$")),
    (S, re.compile(""), re.compile(r"^(?:reset_parameters|_?init_weights)$")),
    (D, re.compile(_TORCH + r"utils/data/"), re.compile("")),
    (D, re.compile(""), re.compile(r"^(?:get_batch|next_batch|load_batch|\w*collate\w*|prefetch\w*|\w*to_device|pin_memory)$")),
    (F, re.compile(_TORCH + r"nn/modules/"), re.compile(r"^_(?:wrapped_call_impl|call_impl)$|forward$")),
    (F, re.compile(_TORCH + r"nn/functional\.py$"), re.compile("")),
    (F, re.compile(""), re.compile(r"^forward$")),
)  # fmt: skip


@dataclass(frozen=True)
class Phases:
    """Per event: its own phase (NONE: nothing tells), the phase it lies in, and the number of the pass it lies in."""

    own: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]  # its own, else the last one's before it
    run: npt.NDArray[np.int64]  # counts changes of `within`
    passes: npt.NDArray[np.int64]  # counts changes of pass: forward with loss, backward with recomputation

    @property
    def one_pass(self) -> npt.NDArray[np.int64]:
        """Which pass an event lies in: F, B, O, S, D or NONE."""
        return np.asarray(_PASS[self.within], dtype=np.int64)


def phases(
    snapshot: Snapshot,
    device: DeviceHistory,
    by_stack: npt.NDArray[np.int64],
    said: Callable[[str], str | None] = phase_of_range,
) -> Phases:
    """The phase of every event of a device; `by_stack` is what each stack tells of it, `said` what the program's words do."""
    own = np.array([_hinted(word, said) for word in snapshot.hints])[device.event_hints]
    own = np.where(own == NONE, _refined(_ranged(device), by_stack[device.event_stacks]), own)
    if (own != NONE).any() and (device.event_stacks != NO_STACK).any():
        before, after = _carried(own), _carried(own[::-1])[::-1]
        in_backward = np.isin(before, (F, L, B, R)) | ((before == NONE) & np.isin(after, (B, R, O)))
        own = np.where((own == NONE) & _without_python(device) & in_backward, B, own)
    within = _carried(own)
    return Phases(own=own, within=within, run=_runs(within), passes=_runs(_PASS[within]))


def stack_phases(snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """What each stack tells of its phase.

    The innermost frame that tells one decides (a loss inside a model's forward is the loss); but a forward below backward
    or below the checkpoint's own functions is a recomputation.
    """
    roles = [frame_phase(frame) for frame in snapshot.frames]
    return np.array([_stack_phase([roles[i] for i in stack]) for stack in snapshot.stacks])


def frame_phase(frame: Frame) -> int:
    """The phase that one frame tells.

    >>> NAMES[frame_phase(Frame("/site-packages/torch/optim/adamw.py", 99, "_multi_tensor_adamw"))]
    'optimizer'
    """
    return next((phase for phase, file, name in _ROLES if name.search(frame.name) and file.search(frame.file)), NONE)


def _stack_phase(roles: Sequence[int]) -> int:
    told = [role for role in roles if role != NONE]
    if not told:
        return NONE
    inner = next((role for role in told if role != R), R)
    return R if inner in (F, L) and (R in told or B in told) else (B if inner == R else inner)


def _hinted(word: str, said: Callable[[str], str | None] = phase_of_range) -> int:
    phase = said(word)
    return NAMES.index(phase) if phase in NAMES else NONE


def _ranged(device: DeviceHistory) -> npt.NDArray[np.int64]:
    """The innermost named range around each event that is named after a phase."""
    found = np.full(device.events, NONE)
    marks = [(mark, phase) for mark in device.annotations if (phase := _hinted(mark.name)) != NONE]
    if device.time_us is None or not marks:
        return found
    times, told = _innermost(marks, int(device.time_us[0]), int(device.time_us[-1]) + 1)
    return np.asarray(told[np.searchsorted(times, device.time_us, side="right") - 1])


def _refined(ranged: npt.NDArray[np.int64], stacked: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What a range says; its stack where no range says anything, or where it tells a part of what the range names."""
    part = ((ranged == F) & (stacked == L)) | ((ranged == B) & (stacked == R))
    return np.where((ranged == NONE) | part, stacked, ranged)


def _innermost(
    marks: Sequence[tuple[Annotation, int]], first_us: int, last_us: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """From which time on which phase holds: the latest begun that has not ended."""
    spans = [
        (first_us if m.start_us is None else m.start_us, last_us if m.end_us is None else m.end_us, p) for m, p in marks
    ]
    spans = sorted(span for span in spans if span[0] < span[1])
    times, told, opened, i = [first_us - 1], [NONE], list[tuple[int, int]](), 0
    for moment in sorted({time for start, end, _ in spans for time in (start, end)}):
        while i < len(spans) and spans[i][0] <= moment:
            opened.append((spans[i][1], spans[i][2]))
            i += 1
        while opened and opened[-1][0] <= moment:
            opened.pop()
        times.append(max(moment, times[-1]))
        told.append(opened[-1][1] if opened else NONE)
    return np.array(times), np.array(told)


def _without_python(device: DeviceHistory) -> npt.NDArray[np.bool_]:
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


def _carried(own: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each unknown takes the last known before it."""
    known = np.where(own != NONE, np.arange(len(own)), 0)
    return np.asarray(own[np.maximum.accumulate(known)] if len(own) else own)


def _runs(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(values[1:] != values[:-1]))) if len(values) else values
