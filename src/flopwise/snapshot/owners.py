"""The owner of every allocation, from stacks and lifetimes; 'unknown' where neither decides.

    made in                  lives                                   owner
    setup (Module.to, init)  into the first forward, or on           parameters (and buffers, which have the same stacks)
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

    forward                  the last matmul's before the loss, as   logits: the head made them
                             large as what the loss makes
    backward                 within it, as large as the logits or    logits, attention scores: the gradients of those, unless
                             as attention's scores                   other tensors of forward have this size
    before the recording     –                                       see before.py
    anywhere                 to the end, as large as cuBLAS takes,   workspace, unless parameters have this size
                             and few of them

A label from the program (user metadata `flopwise.owner:NAME`, a profiler's category) overrides all of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flopwise.snapshot.before import Before, Sizes
from flopwise.snapshot.phases import BACKWARD, DATA, FORWARD, LOSS, NONE, OPTIMIZER, RECOMPUTE, SETUP, Phases
from flopwise.snapshot.snapshot import BEFORE, NO_STACK, DeviceHistory, Flags, Ints, Snapshot
from flopwise.snapshot.steps import Steps
from flopwise.work import operation as work

OWNERS = (*work.OWNERS, work.UNKNOWN)
CATEGORY = "category:"  # the label of a profiler's category
_OWNER_LABEL = "flopwise.owner:"
_PARAMETERS, _GRADIENTS, _STATE = map(OWNERS.index, (work.PARAMETERS, work.GRADIENTS, work.OPTIMIZER_STATE))
_ACTIVATIONS, _SCORES, _LOGITS = map(OWNERS.index, (work.ACTIVATIONS, work.SCORES, work.LOGITS))
_INPUTS, _TEMPORARY = map(OWNERS.index, (work.INPUTS, work.TEMPORARY))
_WORKSPACE, _UNKNOWN = map(OWNERS.index, (work.WORKSPACE, work.UNKNOWN))
_BY_LABEL = {_OWNER_LABEL + owner: code for code, owner in enumerate(OWNERS)} | {
    CATEGORY + "parameter": _PARAMETERS,  # torch.profiler's words (profile_memory=True)
    CATEGORY + "optimizer_state": _STATE,
    CATEGORY + "input": _INPUTS,
    CATEGORY + "temporary": _TEMPORARY,
    CATEGORY + "activation": _ACTIVATIONS,
    CATEGORY + "gradient": _GRADIENTS,
    CATEGORY + "autograd_detail": _TEMPORARY,
}
_WORKSPACES = re.compile(r"cublas|cudablas|workspace", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_MATMUL = re.compile(r"linear|matmul|einsum|(?:^|_)head|logits", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
# What PyTorch takes for cuBLAS on Hopper, and before it (:4096:2:16:8), unless CUBLAS_WORKSPACE_CONFIG says otherwise.
_CUBLAS_BYTES = (32 * 2**20, (2 * 4096 + 8 * 16) * 2**10)
_MOST_WORKSPACES = (
    4  # of a size: one for each thread and stream that multiplies. More are tensors: 4096 × 4096 in bf16, say
)
_SMALLEST = 4096  # bytes from which on a size says something


@dataclass(frozen=True)
class Ownership:
    """For every allocation of a device: an index into OWNERS, and whether it follows from the size alone."""

    owner: Ints
    guessed: Flags


def owners(
    snapshot: Snapshot,
    device: DeviceHistory,
    by_stack: Ints,
    phases: Phases,
    steps: Steps,
    models: Sequence[Sizes] = (),
) -> Ownership:
    """The owner of every allocation of a device; `models`: the ways a given model may hold its parameters."""
    table, last = device.allocations, device.events
    start, end, stack, requested = (table[name].to_numpy() for name in ("start", "end", "stack", "requested_bytes"))
    recorded, stays = start != BEFORE, end >= last
    made = by_stack[stack]  # what was there before is known by its stack only
    made[recorded] = phases.own[start[recorded]]
    # A free with a stack without a phase is the program's own, outside every pass: `del`, or a name bound again.
    outside = (phases.own == NONE) & (device.event_stacks != NO_STACK)
    same_run, same_pass = (_ends_inside(runs, start, end, outside) for runs in (phases.run, phases.passes))
    owner = np.full(len(table), _UNKNOWN)

    owner[(made == SETUP) & _into_forward(phases, end, stays)] = _PARAMETERS
    owner[(made == SETUP) & (owner == _UNKNOWN)] = _TEMPORARY
    owner[made == DATA] = _INPUTS
    owner[made == FORWARD] = np.where(same_pass, _TEMPORARY, _ACTIVATIONS)[made == FORWARD]
    owner[made == LOSS] = _LOGITS
    owner[made == RECOMPUTE] = np.where(same_run, _TEMPORARY, _ACTIVATIONS)[made == RECOMPUTE]
    scores = _mentions(snapshot, _ATTENTION) & _mentions(snapshot, _SOFTMAX)
    owner[np.isin(made, (FORWARD, RECOMPUTE)) & scores[stack]] = _SCORES
    owner[made == BACKWARD] = np.where(same_pass, _TEMPORARY, _GRADIENTS)[made == BACKWARD]
    long_lived = stays | (steps.of(end) > steps.of(start)) if len(steps) else stays | ~same_pass
    owner[made == OPTIMIZER] = np.where(long_lived & ~same_pass, _STATE, _TEMPORARY)[made == OPTIMIZER]
    owner[_batches(phases, steps, start, end, recorded & (made == NONE))] = _INPUTS
    _undecided_at_the_end(owner, requested, phases, start, stays & (made == BACKWARD))
    owner[_mentions(snapshot, _WORKSPACES)[stack]] = _WORKSPACE
    passing = (made == BACKWARD) & recorded & same_pass
    heads = _heads_output(requested, made, start, phases, _mentions(snapshot, _MATMUL)[stack] & recorded)
    sized = _by_size(owner, requested, made, passing, heads)
    split = Before(OWNERS, sized, start, end, requested, phases).split(models)
    open_ = stays & (split == sized) & (made != OPTIMIZER) & (made != SETUP)
    sized = np.where(_workspaces(requested, open_, requested[split == _PARAMETERS]), _WORKSPACE, split)
    labelled = np.array([_BY_LABEL.get(label, -1) for label in snapshot.hints])[table["hint"].to_numpy()]
    return Ownership(np.where(labelled >= 0, labelled, sized), (labelled < 0) & (sized != owner))


def _by_size(owner: Ints, requested: Ints, made: Ints, passing: Flags, heads: Flags) -> Ints:
    """The owners with those that follow from the size: of what `heads` made, and of backward's `passing` tensors."""
    sized = owner.copy()
    scores = np.setdiff1d(requested[owner == _SCORES], requested[owner == _ACTIVATIONS])
    sized[passing & np.isin(requested, scores) & (requested >= _SMALLEST)] = _SCORES
    sized[heads] = _LOGITS
    logits = requested[made == LOSS].max(initial=0)
    if logits >= _SMALLEST and logits not in requested[np.isin(made, (FORWARD, RECOMPUTE)) & ~heads]:
        sized[passing & (requested == logits)] = _LOGITS
    return sized


def _workspaces(requested: Ints, chosen: Flags, parameters: Ints) -> Flags:
    """Of those `chosen`: as large as cuBLAS takes, if they are few and no parameter has this size: its gradient would, too."""
    found = np.zeros(len(requested), dtype=np.bool_)
    for size in np.setdiff1d(_CUBLAS_BYTES, parameters):
        alike = chosen & (requested == size)
        found |= alike if alike.sum() <= _MOST_WORKSPACES else False
    return found


def _heads_output(requested: Ints, made: Ints, start: Ints, phases: Phases, by_matmul: Flags) -> Flags:
    """Of each pass with a loss: the last that a matmul of forward made before it, as large as what the loss makes, or half as
    large: bf16 before a loss in fp32."""
    found = np.zeros(len(made), dtype=np.bool_)
    loss = np.flatnonzero((made == LOSS) & (start != BEFORE) & (requested >= _SMALLEST))
    candidates = np.flatnonzero((made == FORWARD) & by_matmul)
    passes = phases.passes
    for number in np.unique(passes[start[loss]]) if len(loss) else ():
        of_loss = loss[passes[start[loss]] == number]
        largest, first = requested[of_loss].max(), start[of_loss].min()
        here = candidates[(passes[start[candidates]] == number) & (start[candidates] < first)]
        here = here[np.isin(requested[here], (largest, largest // 2))]
        found[here[-1:]] = True
    return found


def _ends_inside(run: Ints, start: Ints, end: Ints, outside: Flags) -> Flags:
    """Whether an allocation ended in the run of events it began in; what is still there did not."""
    inside = (start != BEFORE) & (end < len(run))
    inside[inside] = (run[start[inside]] == run[end[inside]]) & ~outside[end[inside]]
    return np.asarray(inside)


def _into_forward(phases: Phases, end: Ints, stays: Flags) -> Flags:
    forward = np.flatnonzero(np.isin(phases.own, (FORWARD, LOSS)))
    return np.asarray(stays | (end > forward[0]) if len(forward) else stays)


def _batches(phases: Phases, steps: Steps, start: Ints, end: Ints, chosen: Flags) -> Flags:
    """Of those `chosen`: made by the program itself with a forward next, and gone by the end of the step after."""
    known = np.flatnonzero(phases.own != NONE)
    position = np.searchsorted(known, start)
    chosen = chosen & (position < len(known))
    if not len(steps) or not chosen.any():
        return np.zeros(len(start), dtype=np.bool_)
    nexts = known[np.minimum(position, len(known) - 1)]
    within = phases.within[np.maximum(start, 0)]
    chosen &= np.isin(phases.own[nexts], (FORWARD, DATA)) & (end > nexts)  # the forward saw it
    chosen &= ~np.isin(within, (FORWARD, LOSS, BACKWARD, RECOMPUTE))
    return np.asarray(chosen & (steps.of(end) - steps.of(nexts) <= 1))


def _undecided_at_the_end(owner: Ints, requested: Ints, phases: Phases, start: Ints, kept: Flags) -> None:
    """Where the recording ends inside backward, what backward has `kept` until then is a gradient only if it has the size of
    a parameter or of an earlier gradient; else it is unknown."""
    if not len(phases.passes) or phases.one_pass[-1] != BACKWARD:
        return
    cut = kept & (start != BEFORE)
    cut[cut] = phases.passes[start[cut]] == phases.passes[-1]
    known = np.unique(requested[np.isin(owner, (_PARAMETERS, _GRADIENTS)) & ~cut])
    owner[cut & ~np.isin(requested, known)] = _UNKNOWN


def _mentions(snapshot: Snapshot, pattern: re.Pattern[str]) -> Flags:
    """Stacks with a frame with such a function or file name."""
    frames = {
        i
        for i, frame in enumerate(snapshot.frames)
        if pattern.search(frame.name) or pattern.search(frame.file.rpartition("/")[2])
    }
    return np.array([not frames.isdisjoint(stack) for stack in snapshot.stacks], dtype=np.bool_)
