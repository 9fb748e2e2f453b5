"""From probes to ceilings: curves through what was measured, and the tiles that explain the matmuls best."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flopwise.ceilings import Curve, Matmul, Probe, Tile
from flopwise.cost.roofline import SPLITS

Floats = NDArray[np.float64]

TILES = ((64, 64), (128, 64), (128, 128), (128, 256))
_STEPS = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)  # by which one number of the model is changed at a time
_ROUNDS = 200


def curve(probes: Sequence[Probe]) -> Curve:
    """The curve through some probes; made to rise, since noise must not let more work take less time.

    >>> curve([Probe(what="softmax", amount=a, ns=ns) for a, ns in ((1e6, 5.0), (1e5, 7.0), (1e7, 50.0))]).ns
    (7.0, 7.0, 50.0)
    """
    ordered = sorted(probes, key=lambda probe: probe.amount)
    rising = np.maximum.accumulate([probe.ns for probe in ordered])
    return Curve(amount=tuple(probe.amount for probe in ordered), ns=tuple(float(ns) for ns in rising))


def matmul(probes: Sequence[Probe], processors: int) -> Matmul:
    """The tile model that is nearest to the measured products, in the mean square of the logarithm of their ratio.

    Descent along one number at a time: each tile's rate and start, and the cost of joining a split. The best rate seen
    is the first guess of every tile; a tile that explains nothing keeps a guess that loses against the others.
    """
    shapes = np.array([probe.shape for probe in probes], dtype=float)
    measured = np.log([probe.ns for probe in probes])
    best = max(probe.amount / probe.ns for probe in probes) * 1e9 / processors
    guess = np.array([best] * len(TILES) + [2000.0] * len(TILES) + [3000.0])

    def error(numbers: Floats) -> float:
        return float(np.mean((np.log(_times(shapes, numbers, processors)) - measured) ** 2))

    now = error(guess)
    for _ in range(_ROUNDS):
        before = now
        for i in range(len(guess)):
            for step in _STEPS:
                trial = guess.copy()
                trial[i] = min(trial[i] * step, best * 1.2) if i < len(TILES) else trial[i] * step
                if (other := error(trial)) < now:
                    guess, now = trial, other
        if now > before * (1 - 1e-3):
            break
    count = len(TILES)
    tiles = tuple(
        Tile(m=m, n=n, flops_per_s=float(guess[i]), start_ns=float(guess[count + i])) for i, (m, n) in enumerate(TILES)
    )
    return Matmul(peak_flops=best * processors, tiles=tiles, join_ns=float(guess[-1]))


def _times(shapes: Floats, numbers: Floats, processors: int) -> Floats:
    """`roofline.matmul_ns` of many products at once."""
    batch, m, n, k = shapes.T
    join = numbers[-1]
    times = [
        np.ceil(batch * split * np.ceil(m / tile_m) * np.ceil(n / tile_n) / processors)
        * (numbers[len(TILES) + i] + 2e9 * tile_m * tile_n * k / split / numbers[i])
        + (split > 1) * join
        for i, (tile_m, tile_n) in enumerate(TILES)
        for split in SPLITS
    ]
    return np.asarray(np.min(times, axis=0), dtype=np.float64)
