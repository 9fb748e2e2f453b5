"""The noise that benchmarks have, simulated: skewed, outlier-ridden, drifting; levels as shares, times in nanoseconds."""

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]
STEP_NS = 5_000_000

SKEWED = ("lognormal", "gamma", "long tail")
DRIFTS = ("none", "trend", "steep trend", "random walk", "AR(1)", "shift", "wave")


def spread(rng: np.random.Generator, n: int, share: float, kind: str) -> Series:
    """Samples around one level."""
    if kind == "gamma":
        return np.asarray(STEP_NS * (1 + share * rng.gamma(2, 1, n) / np.sqrt(2)))
    if kind == "long tail":
        return np.asarray(STEP_NS * (1 + share * (rng.lognormal(0, 0.8, n) - 1)))
    return np.asarray(STEP_NS * rng.lognormal(0, share, n))


def with_outliers(rng: np.random.Generator, x: Series, share: float) -> Series:
    return np.where(rng.random(x.size) < share, x * rng.uniform(2, 10, x.size), x)


def level(rng: np.random.Generator, n: int, kind: str, amplitude: float) -> Series:
    """A factor per sample that moves by about `amplitude` over n samples; up or down."""
    t, sign = np.arange(n) / n, rng.choice([-1, 1])
    if kind == "none":
        return np.ones(n)
    if kind in ("trend", "steep trend"):
        log = amplitude * t * (3 if kind == "steep trend" else 1)
    elif kind == "random walk":
        log = np.cumsum(rng.normal(size=n)) / np.sqrt(n) * amplitude
    elif kind == "AR(1)":
        log = _ar1(rng, n, 0.95) * amplitude / 2
    elif kind == "shift":  # midway through the first or the second half: of two runs in turn, within one of them
        log = amplitude * (t > rng.choice([0.25, 0.75]))
    else:
        log = amplitude / 2 * np.sin(2 * np.pi * (t * rng.uniform(0.5, 6) + rng.random()))
    return np.exp(sign * log)


def _ar1(rng: np.random.Generator, n: int, phi: float) -> Series:
    x = np.empty(n)
    x[0] = rng.normal()
    for i in range(1, n):
        x[i] = phi * x[i - 1] + np.sqrt(1 - phi**2) * rng.normal()
    return x


def mixed(rng: np.random.Generator, n: int, share: float, trial: int) -> Series:
    """Every skewed kind in turn, every other trial with 1 to 5 % outliers."""
    x = spread(rng, n, share, SKEWED[trial % 3])
    return with_outliers(rng, x, rng.uniform(0.01, 0.05)) if trial % 2 else x
