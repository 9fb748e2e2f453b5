"""How far a step's results are from a reference's, and how far rounding alone takes them: arithmetic over sampled values.

Of the gradients of a step, and of the update of its weights, there are these measures, all of them shares:

- *overall*: ‖x − r‖ / ‖r‖ over all weights;
- *typical*, of the first gradients: the same of each weight, and the geometric mean of these. Rounding adds to all weights alike,
  so this hardly differs from one right step to another, and precision lost in one place shows. In half precision most of the
  error is that of the weights, which every right step rounds alike: r is then exact arithmetic with rounded weights;
- *weight*: of the one weight that is furthest off for what rounding does to it;
- *scale*: how much longer x is along r. Rounding has no direction: a lost factor shows here before it shows elsewhere;
- *decay*, of an update: how far x − r points along the weights, over the half of the values that differ least. Adam's first
  update is a sign, and rounding flips some: the other values show weight decay undisturbed.
"""

import math

import msgspec
import numpy as np
import numpy.typing as npt

from flopwise.capture.compared_steps import FollowedSteps, Quantity, Values
from flopwise.records.run import DECAY, GRADIENT, LEARNT, LOSS, OVERALL, SCALE, TYPICAL, UPDATE, WEIGHT, Difference

LEAST = 2.0**-15  # what rounding gives at the least: fp32 sums of some thousand terms, in any order
LEAST_DECAY = 1e-5  # of an update: without noise, the projection on the weights is this exact
LOSS_SHARE = (
    0.1  # of the gradients' rounding: the loss has at least so much, however small that of one run is by chance
)
FEW_WEIGHTS = 0.2  # over the root of their number: how well the typical weight is known
FLIPS = 6.0  # an update's values that may be another sign by rounding, twice over, where none was seen to be
MOSTLY_NOISE = 0.3  # of a weight's values, by rounding: what one such weight shows says nothing by itself
LEAST_SHARE = 1e-3  # of the root mean square over all weights: a weight's values are not measured by less
_INFINITE = 1e9  # the relative error of what should be zero; JSON has no infinity

_Array = npt.NDArray[np.float64]


class Errors(msgspec.Struct, frozen=True):
    """How far one quantity is from the reference's."""

    kind: str
    step: int
    weights: dict[str, float]
    overall: float
    scale: float
    decay: float
    chance: tuple[float, float] = (0.0, 0.0)  # what an error as large, of no direction, has of `scale` and of `decay`
    moved: dict[str, float] = {}  # how many values of each weight have a share in it


class Distance(msgspec.Struct, frozen=True):
    """How far some steps are from the reference's."""

    losses: dict[int, float]
    quantities: list[Errors]

    def of(self, kind: str, step: int) -> Errors | None:
        return next((one for one in self.quantities if (one.kind, one.step) == (kind, step)), None)


def assumed(reference: FollowedSteps, share: float) -> Distance:
    """What is taken for rounding where it could not be measured."""
    quantities = [
        Errors(kind, step, dict.fromkeys(values, share), share, LOSS_SHARE * share, 0.0)
        for (kind, step), values in reference.values.items()
    ]
    return Distance(dict.fromkeys(reference.losses, LOSS_SHARE * share), quantities)


def distance(found: FollowedSteps, reference: FollowedSteps) -> Distance:
    """Of all that both show."""
    first = abs(next(iter(reference.losses.values()), 0.0))
    losses = {
        step: abs(loss - truth) / max(abs(truth), LEARNT * first, 1e-12)
        for step, truth in reference.losses.items()
        if (loss := found.losses.get(step)) is not None
    }
    quantities = [
        _errors(quantity, found.values[quantity], truth, reference)
        for quantity, truth in reference.values.items()
        if quantity in found.values
    ]
    return Distance(losses, quantities)


def _errors(quantity: Quantity, found: Values, truth: Values, reference: FollowedSteps) -> Errors:
    """Of the weights that both have; a weight without a gradient has one of zero."""
    known = {name: found.get(name, np.zeros_like(one)) for name, one in truth.items() if name in reference.weights}
    pairs = {name: (x, truth[name]) for name, x in known.items() if x.shape == truth[name].shape}
    counts = {name: reference.sizes.get(name, r.size) for name, (_, r) in pairs.items()}
    each = {name: counts[name] / max(1, r.size) for name, (_, r) in pairs.items()}  # a sampled value stands for so many
    total = max(1, sum(counts.values()))
    least = LEAST_SHARE * math.sqrt(sum(each[name] * _dot(r, r) for name, (_, r) in pairs.items()) / total)
    update = quantity[0] == UPDATE
    norm, power, flips = (_sum_of, 1, FLIPS) if update else (_root_of_squares, 2, 0.0)
    moved = {name: _moved(r) for name, (_, r) in pairs.items()}
    weights, along, off, size = {}, np.zeros(4), 0.0, 0.0
    for name, (x, r) in pairs.items():
        weights[name] = _share(norm(x - r), max(norm(r), norm(np.full(r.size, least))))
        scale = _along(x - r, r, max(_dot(r, r), least**2 * r.size))
        scale = max(0.0, scale[0] - flips / moved[name]), scale[1]
        decay = _decay(x - r, r, reference.weights[name]) if update else (0.0, 0.0)
        along += counts[name] * np.square([*scale, *decay])
        off, size = off + each[name] * norm(x - r) ** power, size + each[name] * norm(r) ** power
    overall = _share(off, size) ** (1 / power)
    scaled, by_chance, decayed, decay_by_chance = np.sqrt(along / total).tolist()
    return Errors(*quantity, weights, overall, scaled, decayed, (by_chance, decay_by_chance), moved)


def _dot(left: _Array, right: _Array) -> float:
    """Without BLAS, whose threads wait for one another far longer than some thousand values take."""
    return float(np.einsum("i,i->", left, right))


def _along(off: _Array, direction: _Array, whole: float) -> tuple[float, float]:
    """How far an error points in a direction, and how far one as large does by chance."""
    chance = math.sqrt(_dot(off, off) * _dot(direction, direction) / max(1, off.size))
    return _share(abs(_dot(off, direction)), whole), _share(chance, whole)


def _root_of_squares(values: _Array) -> float:
    return math.sqrt(_dot(values, values))


def _sum_of(values: _Array) -> float:
    """Of an update: rounding changes few of its values, and these by much. Squares would count them alone."""
    return float(np.abs(values).sum())


def _moved(values: _Array) -> float:
    """How many values share in an update: all of most weights, few of an embedding, whose other rows no token asked for.

    >>> _moved(np.array([0.1, -0.1, 0.1, 0.0, 0.0]))
    3.0
    """
    squares = _dot(values, values)
    return max(1.0, round(_sum_of(values) ** 2 / squares, 6)) if squares else 1.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else _INFINITE)


def _decay(off: _Array, update: _Array, weights: _Array) -> tuple[float, float]:
    """How far an error points along the weights, as a share of the update, over the half of it that is smallest.

    >>> weights, update = np.array([1.0, -2.0, 3.0, 1.0]), np.ones(4)
    >>> _decay(-0.01 * weights, update, weights)[0] > 0.005, _decay(np.array([0.0, 0.0, 2.0, 0.0]), update, weights)
    (True, (0.0, 0.0))
    """
    if off.size < 2:
        return 0.0, 0.0
    least = np.argsort(np.abs(off), kind="stable")[: (off.size + 1) // 2]
    off, update, weights = off[least], update[least], weights[least]
    return _along(off, weights, math.sqrt(_dot(weights, weights) * _dot(update, update)))


# --- with what rounding gives


class Near(msgspec.Struct, frozen=True):
    """How far the first gradients are from exact arithmetic with rounded weights, and those of plain PyTorch."""

    found: Distance
    plain: Distance


def judged(
    found: Distance, rounding: list[Distance], *, near: Near | None = None, later: float = LEAST
) -> tuple[Difference, ...]:
    """Every measure with what rounding alone gives: the most of the runs in `rounding`.

    `later`: the least of it, once weights were updated.
    """
    first = [errors.overall for one in rounding if (errors := one.of(GRADIENT, 1)) is not None]
    measures = [
        _loss(step, error, rounding, max(LEAST, LOSS_SHARE * max(first, default=0.0), later if step > 1 else 0.0))
        for step, error in found.losses.items()
    ]
    for errors in found.quantities:
        least = LEAST if (errors.kind, errors.step) == (GRADIENT, 1) else later
        measures += _measures(errors, _known(rounding, errors), least)
    if (gradients := (near.found if near is not None else found).of(GRADIENT, 1)) is not None:
        measures += _typical(gradients, _known([near.plain] if near is not None else rounding, gradients))
    return tuple(measures)


def _known(rounding: list[Distance], errors: Errors) -> list[Errors]:
    return [same for one in rounding if (same := one.of(errors.kind, errors.step)) is not None]


def _typical(errors: Errors, known: list[Errors]) -> list[Difference]:
    rounding = {name: max([LEAST, *(one.weights.get(name, 0.0) for one in known)]) for name in errors.weights}
    sure = [name for name, share in rounding.items() if share < MOSTLY_NOISE]
    if not sure:
        return []
    error = _mean([max(errors.weights[name], LEAST) for name in sure])
    share = (1 + FEW_WEIGHTS / math.sqrt(len(sure))) * _mean([rounding[name] for name in sure])
    return [Difference(kind=errors.kind, step=errors.step, measure=TYPICAL, error=error, rounding=share)]


def _loss(step: int, error: float, rounding: list[Distance], least: float) -> Difference:
    """The steps before count as well: one number is little to know a spread by."""
    seen = [share for one in rounding for at, share in one.losses.items() if at <= step]
    return Difference(kind=LOSS, step=step, error=error, rounding=max([least, *seen]))


def _measures(errors: Errors, known: list[Errors], least: float) -> list[Difference]:
    rounding = {name: max([least, *(one.weights.get(name, 0.0) for one in known)]) for name in errors.weights}
    if errors.kind == UPDATE:
        rounding = {name: _with_flips(share, errors.moved.get(name, 1.0)) for name, share in rounding.items()}
    sure = [name for name, share in rounding.items() if share < MOSTLY_NOISE]

    def one(measure: str, error: float, *shares: float, where: str = "") -> Difference:
        most = max(shares)
        return Difference(kind=errors.kind, step=errors.step, measure=measure, error=error, rounding=most, where=where)

    found = [
        one(OVERALL, errors.overall, least, *(one.overall for one in known)),
        one(SCALE, errors.scale, least, *(max(one.scale, one.chance[0]) for one in known)),
    ]
    if sure:
        worst = max(sure, key=lambda name: errors.weights[name] / rounding[name])
        found.append(one(WEIGHT, errors.weights[worst], rounding[worst], where=worst))
    if errors.kind == UPDATE:
        decays = [max(one.decay, one.chance[1]) for one in known]
        found.append(one(DECAY, errors.decay, LEAST_DECAY * least / LEAST, *decays))
    return found


def _with_flips(share: float, n: float) -> float:
    """Of few values, rounding flips the sign of some in one run and of others in the next: their number is a Poisson count.

    >>> _with_flips(0.004, 16_384) < 0.006 < 0.1 < _with_flips(0.004, 64)
    True
    """
    return share + 2 * math.sqrt(2 * share / n) + FLIPS / n


def _mean(shares: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, shares)) / len(shares))
