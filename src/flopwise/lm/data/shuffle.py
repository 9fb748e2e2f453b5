"""A permutation of 0 … n−1 that is computed, not stored: where number i lies is a function of the seed alone."""

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment and multipliers (Steele, Lea, Flood 2014)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Numbers = npt.NDArray[np.uint64]


def shuffled(index: npt.NDArray[Any], size: int, seed: int, epoch: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where each index lies in its epoch's permutation: a Feistel network over the next power of four, and what it puts
    beyond the end is put through it again.

    >>> sorted(shuffled(np.arange(10), 10, 0, np.zeros(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = _mixed(_GOLDEN * epoch.astype(np.uint64) ^ np.uint64(seed % 2**64))
    found = _network(index.astype(np.uint64), half, keys)
    while (beyond := found >= size).any():
        found[beyond] = _network(found[beyond], half, keys[beyond])
    return found.astype(np.int64)


def _network(numbers: Numbers, half: np.uint64, keys: Numbers) -> Numbers:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for _ in range(_ROUNDS):
        keys = _mixed(keys)
        left, right = right, left ^ (_mixed(right ^ keys) & mask)
    return left << half | right


def _mixed(numbers: Numbers) -> Numbers:
    numbers = numbers + _GOLDEN
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))
