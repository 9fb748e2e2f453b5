"""From probes to ceilings: curves through what was measured, and the tiles that explain the matmuls best."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flopwise.errors import FlopwiseError
from flopwise.predict.constants import LISTED_SHARE, NARROW_HEAD, SPLITS
from flopwise.records import ceilings as probed
from flopwise.records.ceilings import COMPILED, Ceilings, Curve, HostCost, HostCounts, Matmul, Near, Probe, Tile
from flopwise.spec.dtypes import item_bytes
from flopwise.work.operation import ELEMENTWISE

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
        raise FlopwiseError(
            "the probes are too few for this machine's ceilings", "run flopwise doctor --calibrate again"
        )
    one = {what: some[0].ns for (what, dtype), some in by_what.items() if not some[0].amount}
    largest = max(by_what[ELEMENTWISE, ""], key=lambda probe: probe.amount)  # a cache holds none of it
    return Ceilings(
        gpu=gpu,
        how=probed.MEASURED,
        processors=processors,
        bandwidth_bytes_per_s=1e9 * largest.amount / largest.ns,
        matmul={
            dtype: matmul(some, processors, memory[ELEMENTWISE])
            for (what, dtype), some in by_what.items()
            if what == "matmul"
        },
        memory=memory,
        attention=_attention("attention", by_what),
        attention_backward=_attention("attention backward", by_what),
        host=_host(probes) if asynchronous else {"forward": HostCost(op_ns=0.0, view_ns=0.0, kernel_ns=0.0)},
        vector_flops_per_s=max(
            (1e9 * p.amount / p.ns for p in by_what.get((probed.VECTOR, "fp32"), ()) if p.ns), default=0.0
        ),
        latency_ns=one.get("latency", 0.0),
        graph_gap_ns=one.get("graph gap", 0.0),
        switch_ns=one.get("switch", 0.0),
        backward_start_ns=one.get("host:start", 0.0),
        compiled_call_ns=one.get(COMPILED, 0.0),
        compiled=_compiled(probes) if asynchronous else {},
        versions=versions,
    )


def _attention(what: str, by_what: Mapping[tuple[str, str], Sequence[Probe]]) -> dict[str, Curve]:
    """By precision; heads wider than 64 do twice as much for each score, and have curves of their own."""
    found: dict[str, Curve] = {}
    for (name, dtype), some in by_what.items():
        if name == what:
            for key, wide in ((dtype, False), (f"{dtype}{probed.WIDE}", True)):
                alike = [probe for probe in some if (bool(probe.shape) and probe.shape[-1] > NARROW_HEAD) == wide]
                found |= {key: curve(alike)} if alike else {}
    return found


def _host(probes: Sequence[Probe]) -> dict[str, HostCost]:
    """Per phase: its launch time without that of views and further kernels, over its operations.

    A phase that was probed in several steps, deep and shallow, with casts and without, has a cost of its own, one for each
    operation (views included) and one for each cast. 'host:lists' is an optimizer over lists of tensors: what its
    operations do not explain is the lists' tensors.
    """
    one = {probe.what: probe.ns for probe in probes}
    view_ns, kernel_ns, start_ns = one["host:view"], one["host:kernel"], one.get("host:start", 0.0)
    steps: dict[str, list[tuple[HostCounts, float]]] = {}
    for probe in probes:
        if probe.what.startswith("host:") and probe.shape and not probe.what.startswith(COMPILED):
            phase, counts = probe.what.removeprefix("host:"), HostCounts(*probe.shape)
            known_ns = counts.views * view_ns + counts.kernels * kernel_ns + start_ns * (phase == "backward")
            steps.setdefault(phase, []).append((counts, probe.ns - known_ns))
    lists = steps.pop("lists", None)
    costs = {phase: _host_cost(some, view_ns, kernel_ns) for phase, some in steps.items()}
    if lists and "optimizer" in costs:
        single = costs["optimizer"]
        left = [ns - counts.ops * single.op_ns for counts, ns in lists]
        columns = [[float(counts.listed) for counts, _ in lists]] + [[1.0] * len(lists)] * (len(lists) > 1)
        listed_ns, *start = _shares(columns, left)
        costs["optimizer"] = msgspec.structs.replace(single, listed_ns=listed_ns, start_ns=sum(start))
    return costs


def _host_cost(steps: Sequence[tuple[HostCounts, float]], view_ns: float, kernel_ns: float) -> HostCost:
    """What an operation costs, by one step; by several also what a cast does, and the phase whatever is in it."""
    counts, times = zip(*steps, strict=True)
    if len(steps) == 1:
        op_ns = times[0] / max(1, counts[0].ops)
        return HostCost(op_ns=max(kernel_ns, op_ns), view_ns=view_ns, kernel_ns=kernel_ns)
    apart = len(counts) > 2 and any(c.casts for c in counts)
    columns = [[float(c.ops - c.casts * apart) for c in counts], [1.0] * len(counts)]
    columns += [[float(c.casts) for c in counts]] * apart
    op_ns, start_ns, *cast = _shares(columns, times)
    cast_ns = max(kernel_ns, cast[0]) if cast else None
    return HostCost(op_ns=max(kernel_ns, op_ns), view_ns=0.0, kernel_ns=kernel_ns, cast_ns=cast_ns, start_ns=start_ns)


def _compiled(probes: Sequence[Probe]) -> dict[str, HostCost]:
    """Per phase of compiled graphs: the call, each kernel, and each tensor that is handed to it."""
    found = {}
    for phase in ("forward", "backward"):
        some = [probe for probe in probes if probe.what == f"{COMPILED} {phase}"]
        if len(some) > 2:
            counts = [HostCounts(*probe.shape) for probe in some]
            columns = [[float(c.ops) for c in counts], [1.0] * len(some), [float(c.listed) for c in counts]]
            times = [probe.ns for probe in some]
            op_ns, start_ns, listed_ns = _shares(columns, times)
            if listed_ns > LISTED_SHARE * op_ns:  # kernels and tensors grow together: noise alone separates them
                op_ns, start_ns = _shares([[c.ops + LISTED_SHARE * c.listed for c in counts], columns[1]], times)
                listed_ns = LISTED_SHARE * op_ns
            found[phase] = HostCost(op_ns=op_ns, view_ns=0.0, kernel_ns=op_ns, listed_ns=listed_ns, start_ns=start_ns)
    return found if "forward" in found else {}


def _shares(columns: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """What one of each column costs, none less than nothing, so that the sums are nearest to the times in proportion.

    Of the few subsets of columns, the best that needs no cost below zero.

    >>> [round(cost, 6) for cost in _shares([[10, 20, 30], [1, 1, 1]], [25, 45, 65])]
    [2.0, 5.0]
    """
    table, wanted = np.array(columns, dtype=float).T, np.array(times, dtype=float)
    scale = 1 / np.maximum(np.abs(wanted), 1.0)
    best, least = np.zeros(table.shape[1]), np.inf
    for kept in itertools.product((True, False), repeat=table.shape[1]):
        chosen = np.flatnonzero(kept)
        found = np.zeros(table.shape[1])
        if len(chosen):
            found[chosen] = np.linalg.lstsq(table[:, chosen] * scale[:, None], wanted * scale, rcond=None)[0]
        error = float(np.sum(((table @ found - wanted) * scale) ** 2))
        if found.min() >= 0 and error < least * (1 - 1e-9):
            best, least = found, error
    return [float(cost) for cost in best]


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
    return float(batch * (m * k + k * n + m * n) * item_bytes(probe.dtype.partition(",")[0], 2))


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
    """`op_time.matmul_ns` of many products at once."""
    rates, starts = _rates_and_starts(*numbers[:4])
    joined = np.array([(split > 1) * numbers[4] for split in SPLITS])
    times = starts[None, :, None] + waves * work * (1e9 / rates)[None, :, None] + joined[None, None, :]
    return np.asarray(times.min(axis=(1, 2)), dtype=np.float64)
