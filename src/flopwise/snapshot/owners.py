"""Whose bytes they are, told from stacks and lifetimes; what neither tells is 'unknown', and said to be.

    made in                  lives                                   owner
    setup (Module.to, init)  into the first forward, or on           parameters (and buffers: a stack does not tell them apart)
    data loading             –                                       inputs
    forward                  beyond the forward pass                 activations; a softmax of attention: attention scores
    forward                  within it                               temporary; of attention: attention scores
    loss                     –                                       logits
    backward                 beyond the backward pass                gradients
    backward                 within it                               temporary
    recomputation            beyond it                               activations, else temporary; of attention: as in forward
    optimizer                beyond the next step's start            optimizer state, else temporary
    cuBLAS and its kin       –                                       workspace
    outside every phase      from before a forward to its step's end inputs

Guessed from the size alone, and counted as such:

    backward                 within it, as large as the logits or    logits, attention scores: the gradients of those
                             as attention's scores
    anywhere                 to the end, as large as cuBLAS takes    workspace

Said by the program (user metadata `flopwise.owner:NAME`, a profiler's category) goes before all of it.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwise.snapshot.phases import NONE, B, D, F, L, O, Phases, R, S
from flopwise.snapshot.snapshot import BEFORE, NO_STACK, DeviceHistory, Snapshot
from flopwise.snapshot.steps import Steps
from flopwise.work import operation as work

OWNERS = (*work.OWNERS, work.UNKNOWN)
SAID = "flopwise.owner:"
(
    _PARAMETERS, _GRADIENTS, _STATE, _ACTIVATIONS, _SCORES, _LOGITS, _INPUTS, _BUFFERS, _TEMPORARY, _WORKSPACE, _UNKNOWN,
) = range(len(OWNERS))  # fmt: skip
_CATEGORIES = {  # torch.profiler's words (profile_memory=True)
    "parameter": _PARAMETERS, "optimizer_state": _STATE, "input": _INPUTS, "temporary": _TEMPORARY,
    "activation": _ACTIVATIONS, "gradient": _GRADIENTS, "autograd_detail": _TEMPORARY,
}  # fmt: skip
_WORKSPACES = re.compile(r"cublas|cudablas|workspace", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
# What PyTorch takes for cuBLAS on Hopper, and before it (:4096:2:16:8), unless CUBLAS_WORKSPACE_CONFIG says otherwise.
_CUBLAS_BYTES = (32 * 2**20, (2 * 4096 + 8 * 16) * 2**10)
_SMALLEST = 4096  # bytes whose size alone tells something


@dataclass(frozen=True)
class Owned:
    """For every allocation of a device: an index into OWNERS, and whether its size alone tells so."""

    owner: npt.NDArray[np.int64]
    guessed: npt.NDArray[np.bool_]


def owners(
    snapshot: Snapshot, device: DeviceHistory, by_stack: npt.NDArray[np.int64], phases: Phases, steps: Steps
) -> Owned:
    """Whose every allocation of a device is."""
    table, last = device.allocations, device.events
    start, end, stack = (table[name].to_numpy() for name in ("start", "end", "stack"))
    recorded, stays = start != BEFORE, end >= last
    made = by_stack[stack]  # of what was there before, only a stack can tell
    made[recorded] = phases.own[start[recorded]]
    # A free with a stack that tells no phase is the program's own, outside every pass: `del`, or a name bound again.
    outside = (phases.own == NONE) & (device.event_stacks != NO_STACK)
    same_run, same_pass = (_shares(runs, start, end, outside) for runs in (phases.run, phases.passes))
    found = np.full(len(table), _UNKNOWN)

    found[(made == S) & _into_forward(phases, end, stays)] = _PARAMETERS
    found[(made == S) & (found == _UNKNOWN)] = _TEMPORARY
    found[made == D] = _INPUTS
    found[made == F] = np.where(same_pass, _TEMPORARY, _ACTIVATIONS)[made == F]
    found[made == L] = _LOGITS
    found[made == R] = np.where(same_run, _TEMPORARY, _ACTIVATIONS)[made == R]
    found[np.isin(made, (F, R)) & _mentions_scores(snapshot)[stack]] = _SCORES
    found[made == B] = np.where(same_pass, _TEMPORARY, _GRADIENTS)[made == B]
    long_lived = stays | (steps.of(end) > steps.of(start)) if len(steps) else stays | ~same_pass
    found[made == O] = np.where(long_lived & ~same_pass, _STATE, _TEMPORARY)[made == O]
    found[_between(phases, steps, start, end, recorded, made)] = _INPUTS
    _undecided_at_the_end(found, table["requested_bytes"].to_numpy(), phases, start, stays, made)
    found[_mentions(snapshot, _WORKSPACES)[stack]] = _WORKSPACE
    passing = (made == B) & recorded & same_pass
    sized = _by_size(found, table["requested_bytes"].to_numpy(), made, passing, stays & (made != O) & (made != S))
    said = np.array([_said(word) for word in snapshot.hints])[table["hint"].to_numpy()]
    return Owned(np.where(said >= 0, said, sized), (said < 0) & (sized != found))


def _by_size(
    found: npt.NDArray[np.int64],
    requested: npt.NDArray[np.int64],
    made: npt.NDArray[np.int64],
    passing: npt.NDArray[np.bool_],
    stays: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """The owners with what only a size tells: of backward's `passing` tensors, and of what `stays` to the end."""
    sized = found.copy()
    scores = np.setdiff1d(requested[found == _SCORES], requested[found == _ACTIVATIONS])
    sized[passing & np.isin(requested, scores) & (requested >= _SMALLEST)] = _SCORES
    logits = requested[made == L].max(initial=0)
    if logits >= _SMALLEST:
        sized[passing & (requested == logits)] = _LOGITS
    sized[stays & np.isin(requested, _CUBLAS_BYTES)] = _WORKSPACE
    return sized


def _said(word: str) -> int:
    if word.startswith(SAID) and word.removeprefix(SAID) in OWNERS:
        return OWNERS.index(word.removeprefix(SAID))
    return _CATEGORIES.get(word.removeprefix("category:"), -1) if word.startswith("category:") else -1


def _shares(
    run: npt.NDArray[np.int64], start: npt.NDArray[np.int64], end: npt.NDArray[np.int64], outside: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Whether an allocation ended in the run of events it began in; what is still there did not."""
    found = (start != BEFORE) & (end < len(run))
    found[found] = (run[start[found]] == run[end[found]]) & ~outside[end[found]]
    return np.asarray(found)


def _into_forward(phases: Phases, end: npt.NDArray[np.int64], stays: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    forward = np.flatnonzero(np.isin(phases.own, (F, L)))
    return np.asarray(stays | (end > forward[0]) if len(forward) else stays)


def _between(
    phases: Phases,
    steps: Steps,
    start: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    recorded: npt.NDArray[np.bool_],
    made: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Made by the program itself with a forward next, and gone by the end of the step after: a batch."""
    chosen = recorded & (made == NONE)
    known = np.flatnonzero(phases.own != NONE)
    position = np.searchsorted(known, start)
    chosen &= position < len(known)
    if not len(steps) or not chosen.any():
        return np.zeros(len(start), dtype=np.bool_)
    nexts = known[np.minimum(position, len(known) - 1)]
    within = phases.within[np.maximum(start, 0)]
    after_start = end > nexts  # the forward saw it
    return np.asarray(
        chosen
        & np.isin(phases.own[nexts], (F, D))
        & ~np.isin(within, (F, L, B, R))
        & after_start
        & (steps.of(end) - steps.of(nexts) <= 1)
    )


def _undecided_at_the_end(
    found: npt.NDArray[np.int64],
    requested: npt.NDArray[np.int64],
    phases: Phases,
    start: npt.NDArray[np.int64],
    stays: npt.NDArray[np.bool_],
    made: npt.NDArray[np.int64],
) -> None:
    """Where the recording ends inside backward, what backward has made and not freed is a gradient only if it has the size of
    a parameter or of an earlier gradient; else nobody can know."""
    if not len(phases.passes) or phases.one_pass[-1] != B:
        return
    cut = stays & (made == B) & (start != BEFORE)
    cut[cut] = phases.passes[start[cut]] == phases.passes[-1]
    known = np.unique(requested[np.isin(found, (_PARAMETERS, _GRADIENTS)) & ~cut])
    found[cut & ~np.isin(requested, known)] = _UNKNOWN


def _mentions_scores(snapshot: Snapshot) -> npt.NDArray[np.bool_]:
    """Stacks of a softmax inside something called attention."""
    attention = _mentions(snapshot, _ATTENTION)
    return attention & _mentions(snapshot, _SOFTMAX)


def _mentions(snapshot: Snapshot, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Stacks with a frame whose function or file is named so."""
    frames = {
        i
        for i, frame in enumerate(snapshot.frames)
        if pattern.search(frame.name) or pattern.search(frame.file.rpartition("/")[2])
    }
    return np.array([not frames.isdisjoint(stack) for stack in snapshot.stacks], dtype=np.bool_)
