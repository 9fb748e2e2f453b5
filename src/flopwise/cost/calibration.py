"""From probes to ceilings: curves through what was measured, and the tiles that explain the matmuls best."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flopwise.ceilings import MEASURED, Ceilings, Curve, HostCost, Matmul, Near, Probe, Tile
from flopwise.cost.roofline import NARROW, SPLITS, WIDE
from flopwise.errors import FlopwiseError
from flopwise.work import ELEMENTWISE

Floats = NDArray[np.float64]

# Output tiles that cuBLAS has kernels for, either way round: fine enough that a good library can fill its last wave.
TILES = tuple(
    tile
    for m, n in ((64, 64), (64, 96), (64, 128), (96, 128), (128, 128), (96, 192), (128, 192), (128, 256), (192, 256))
    for tile in sorted({(m, n), (n, m)})
)
_AREAS = np.array([m * n for m, n in TILES], dtype=float)
_STEPS = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)  # by which one number of the model is changed at a time
_ROUNDS = 200


def ceilings(
    probes: Sequence[Probe], *, gpu: str, processors: int, versions: dict[str, str], asynchronous: bool = True
) -> Ceilings:
    """A machine's ceilings from its probes. `asynchronous`: the host launches and goes on, as with every GPU."""
    by_what: dict[tuple[str, str], list[Probe]] = {}
    for probe in probes:
        by_what.setdefault((probe.what, probe.dtype), []).append(probe)
    memory = {what: curve(some) for (what, dtype), some in by_what.items() if not dtype and some[0].amount}
    if not memory or ("matmul", "fp32") not in by_what:
        raise FlopwiseError("the probes do not tell this machine's limits", "run flopwise doctor --calibrate again")
    one = {what: some[0].ns for (what, dtype), some in by_what.items() if not some[0].amount}
    return Ceilings(
        gpu=gpu,
        how=MEASURED,
        processors=processors,
        bandwidth_bytes_per_s=_bandwidth(by_what[ELEMENTWISE, ""]),
        matmul={
            dtype: matmul(some, processors, memory[ELEMENTWISE])
            for (what, dtype), some in by_what.items()
            if what == "matmul"
        },
        memory=memory,
        attention=_attention("attention", by_what),
        attention_backward=_attention("attention backward", by_what),
        host=_host(probes) if asynchronous else {"forward": HostCost(op_ns=0.0, view_ns=0.0, kernel_ns=0.0)},
        latency_ns=one.get("latency", 0.0),
        graph_gap_ns=one.get("graph gap", 0.0),
        switch_ns=one.get("switch", 0.0),
        backward_start_ns=one.get("host:start", 0.0),
        compiled_call_ns=one.get("host:compiled", 0.0),
        versions=versions,
    )


def _bandwidth(probes: Sequence[Probe]) -> float:
    """Of the largest: what is small enough for a cache says nothing of the memory."""
    largest = max(probes, key=lambda probe: probe.amount)
    return 1e9 * largest.amount / largest.ns


def _attention(what: str, by_what: Mapping[tuple[str, str], Sequence[Probe]]) -> dict[str, Curve]:
    """By precision; heads wider than 64 do twice as much for each score, and have curves of their own."""
    found: dict[str, Curve] = {}
    for (name, dtype), some in by_what.items():
        if name == what:
            for key, wide in ((dtype, False), (f"{dtype}{WIDE}", True)):
                alike = [probe for probe in some if (bool(probe.shape) and probe.shape[-1] > NARROW) == wide]
                found |= {key: curve(alike)} if alike else {}
    return found


def _host(probes: Sequence[Probe]) -> dict[str, HostCost]:
    """Per phase: what is left of its launch time when views and further kernels have had theirs, over its operations.

    'host:lists' is an optimizer over lists of tensors: what its operations leave goes to the tensors in the lists.
    """
    view_ns = next(probe.ns for probe in probes if probe.what == "host:view")
    kernel_ns = next(probe.ns for probe in probes if probe.what == "host:kernel")
    costs = {}
    for probe in probes:
        if probe.what.startswith("host:") and probe.shape:
            ops, views, kernels, _ = probe.shape
            op_ns = (probe.ns - views * view_ns - kernels * kernel_ns) / max(1, ops)
            costs[probe.what.removeprefix("host:")] = HostCost(
                op_ns=max(kernel_ns, op_ns), view_ns=view_ns, kernel_ns=kernel_ns
            )
    lists, single = costs.pop("lists", None), costs.get("optimizer")
    if lists and single:
        ops, _, _, listed = next(probe.shape for probe in probes if probe.what == "host:lists")
        each_ns = max(0.0, lists.op_ns - single.op_ns) * ops / max(1, listed)
        costs["optimizer"] = msgspec.structs.replace(single, listed_ns=each_ns)
    return costs


def curve(probes: Sequence[Probe]) -> Curve:
    """The curve through some probes; made to rise, since noise must not let more work take less time.

    >>> curve([Probe(what="softmax", amount=a, ns=ns) for a, ns in ((1e6, 5.0), (1e5, 7.0), (1e7, 50.0))]).ns
    (7.0, 7.0, 50.0)
    """
    by_amount: dict[float, list[float]] = {}
    for probe in sorted(probes, key=lambda probe: probe.amount):
        by_amount.setdefault(probe.amount, []).append(probe.ns)
    rising = np.maximum.accumulate([float(np.median(ns)) for ns in by_amount.values()])
    return Curve(amount=tuple(by_amount), ns=tuple(float(ns) for ns in rising))


def tiles(best: float, half_area: float, start_ns: float, start_ns_per_area: float) -> tuple[Tile, ...]:
    """Every tile by four numbers: a larger one reuses more of what it loads, and takes longer to begin and to end.

    >>> [round(tile.flops_per_s) for tile in tiles(1000.0, 4096.0, 500.0, 0.1)[:2]]      # half the rate at half_area
    [500, 600]
    """
    rates, starts = _rates_and_starts(best, half_area, start_ns, start_ns_per_area)
    return tuple(
        Tile(m=m, n=n, flops_per_s=float(rate), start_ns=float(start))
        for (m, n), rate, start in zip(TILES, rates, starts, strict=True)
    )


def matmul(probes: Sequence[Probe], processors: int, moving: Curve | None = None) -> Matmul:
    """The tile model that is nearest to the measured products, in the mean square of the logarithm of their ratio.

    Descent along one number at a time: those of `tiles`, and the cost of joining a split. A product that takes as long
    as `moving` its bytes says nothing of tiles.
    """
    shapes = np.array([probe.shape for probe in probes], dtype=float)
    measured = np.log([probe.ns for probe in probes])
    seen = max(probe.amount / probe.ns for probe in probes) * 1e9
    waves, work = _waves_and_work(shapes, processors)
    least = np.array([moving.at(_bytes(probe)) if moving else 0.0 for probe in probes])
    guess = np.array([seen / processors, 2000.0, 1500.0, 0.05, 3000.0])

    def error(numbers: Floats) -> float:
        return float(np.mean((np.log(np.maximum(least, _times(waves, work, numbers))) - measured) ** 2))

    now = error(guess)
    for _ in range(_ROUNDS):
        before = now
        for i in range(len(guess)):
            for step in _STEPS:
                trial = guess.copy()
                trial[i] *= step
                if (other := error(trial)) < now:
                    guess, now = trial, other
        if now > before * (1 - 1e-3):
            break
    best, half_area, start_ns, start_ns_per_area, join_ns = map(float, guess)
    explained = np.log(np.maximum(least, _times(waves, work, guess)))
    near = tuple(
        Near(shape=(s[0], s[1], s[2], s[3]), miss=float(miss))
        for s, miss in zip((probe.shape for probe in probes), measured - explained, strict=True)
    )
    made = tiles(best, half_area, start_ns, start_ns_per_area)
    return Matmul(peak_flops=seen, tiles=made, join_ns=join_ns, near=near)


def _bytes(probe: Probe) -> float:
    batch, m, n, k = probe.shape
    return float(batch * (m * k + k * n + m * n) * (4 if probe.dtype in ("fp32", "tf32") else 2))


def _rates_and_starts(best: float, half_area: float, start_ns: float, per_area: float) -> tuple[Floats, Floats]:
    return best * _AREAS / (_AREAS + half_area), start_ns + per_area * _AREAS


def _waves_and_work(shapes: Floats, processors: int) -> tuple[Floats, Floats]:
    """By product, tile and split: how many waves there are, and the FLOPs of one tile."""
    batch, m, n, k = (column[:, None, None] for column in shapes.T)
    tile_m, tile_n = (np.array(side, dtype=float)[None, :, None] for side in zip(*TILES, strict=True))
    split = np.array(SPLITS, dtype=float)[None, None, :]
    waves = np.ceil(batch * split * np.ceil(m / tile_m) * np.ceil(n / tile_n) / processors)
    return waves, 2 * tile_m * tile_n * k / split


def _times(waves: Floats, work: Floats, numbers: Floats) -> Floats:
    """`roofline.matmul_ns` of many products at once."""
    rates, starts = _rates_and_starts(*numbers[:4])
    joined = np.array([(split > 1) * numbers[4] for split in SPLITS])
    times = starts[None, :, None] + waves * work * (1e9 / rates)[None, :, None] + joined[None, None, :]
    return np.asarray(times.min(axis=(1, 2)), dtype=np.float64)
