"""What was allocated before the recording, by its size.

Nothing but its size and its end is known of it. Two things tell how many parameters have a size: the model, if it is given; else
the gradients that a backward pass of the recording makes, one for each parameter. Of what was there before, with n parameters of
a size:

    freed outside of backward                  gradients of the step before
    kept, the first n of this size             parameters
    kept, the next n, if backward makes none   gradients, which are added to in place
    kept, the rest, if the recording trains    optimizer state; with a model also in other precisions than the weights'

All of it is a guess and counted as one. The rest stays unknown.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flopwise.snapshot.phases import BACKWARD, OPTIMIZER, Phases
from flopwise.snapshot.snapshot import BEFORE, Ints
from flopwise.work.operation import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, UNKNOWN

Sizes = Mapping[int, int]  # elements of a tensor -> how many parameters have so many

_ITEM_BYTES = (4, 2)  # of a weight: fp32; bf16 or fp16
_STATE_BYTES = (4, 2, 1)
_ENOUGH = 0.5  # of a model's bytes have to be there with its sizes: else it is another model, or a sharded one


def element_counts(shapes: Iterable[Sequence[int]]) -> Sizes:
    """How many parameters have how many elements.

    >>> dict(element_counts([(2, 3), (6,), (4,)]))
    {6: 2, 4: 1}
    """
    return Counter(int(np.prod(shape)) for shape in shapes)


class Before:
    """Splits what was there before the recording; `owners` are the words that `owner` has indices of."""

    def __init__(self, owners: Sequence[str], owner: Ints, start: Ints, end: Ints, requested: Ints, phases: Phases):
        self._parameters, self._gradients, self._state, unknown = map(
            owners.index, (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, UNKNOWN)
        )
        self._owner, self._requested = owner, requested
        there = (start == BEFORE) & (owner == unknown)
        last = len(phases.own)
        self._kept, self._gone = there & (end >= last), there & (end < last)
        self._gone[self._gone] = phases.one_pass[end[self._gone]] != BACKWARD  # backward frees activations
        made = (start != BEFORE) & (owner == self._gradients)
        self._made = _most_in_a_pass(requested[made], phases.passes[start[made]])
        self._known = Counter(requested[owner == self._parameters].tolist())
        self._trains = bool(np.isin(phases.own, (BACKWARD, OPTIMIZER)).any())

    def split(self, models: Sequence[Sizes]) -> Ints:
        """The owners with those of what was there before; `models`: the ways the given model may hold its parameters."""
        weights, others = self._of_model(models) if models else (self._made, frozenset[int]())
        found = self._owner.copy()
        trains = self._trains or self._sets(weights) >= 3  # parameters and two moments of each
        for size, count in weights.items():
            rows = np.flatnonzero(self._kept & (self._requested == size))
            first = max(count - self._known[size], 0)
            found[rows[:first]] = self._parameters
            if trains:
                in_place = count if self._trains and size not in self._made else 0
                found[rows[first : first + in_place]] = self._gradients
                found[rows[first + in_place :]] = self._state
        if trains:
            found[self._gone & np.isin(self._requested, [*weights])] = self._gradients
            found[self._kept & np.isin(self._requested, [*(others - weights.keys())])] = self._state
        return found

    def _of_model(self, models: Sequence[Sizes]) -> tuple[Sizes, frozenset[int]]:
        """The bytes of its parameters in the precision and form that most of what is there agrees with, and in others."""
        have = Counter(self._requested[self._kept].tolist())
        forms = [(sizes, item) for sizes in models for item in _ITEM_BYTES]
        fits = [sum(n * item * min(count, have[n * item]) for n, count in sizes.items()) for sizes, item in forms]
        sizes, item = forms[int(np.argmax(fits))]
        if max(fits) < _ENOUGH * sum(n * item * count for n, count in sizes.items()):
            return {}, frozenset()
        return {n * item: count for n, count in sizes.items()}, frozenset(n * b for n in sizes for b in _STATE_BYTES)

    def _sets(self, weights: Sizes) -> float:
        """How often the parameters' bytes are there."""
        bytes_of_one = sum(size * count for size, count in weights.items())
        kept = self._requested[self._kept]
        return int(kept[np.isin(kept, [*weights])].sum()) / max(bytes_of_one, 1)


def _most_in_a_pass(requested: Ints, passes: Ints) -> Sizes:
    """Of each size: the most that one pass makes."""
    most: dict[int, int] = {}
    for (size, _), count in Counter(zip(requested.tolist(), passes.tolist(), strict=True)).items():
        most[size] = max(most.get(size, 0), count)
    return most
