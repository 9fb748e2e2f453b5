"""`launch-overhead`: what it costs to start work on the device, beside the work.

An elementwise add reads two tensors and writes one. Below some size its time no longer follows the size: what is left is the
cost of the call (Python, the dispatcher, the driver). On a GPU the three clocks tell the two apart, and a CUDA graph of many
adds has one launch for all of them.

The GPU's clock runs from an event before the work to one after it. Around a single add it counts the events and the start and end
of the kernel, too, which many adds in a row share: the GPU's time of an add that is waited for is an upper bound of its
work, and 'not the GPU's work' a lower one.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import (
    INCONCLUSIVE,
    NOT_MEASURABLE,
    Experiment,
    Picture,
    Row,
    Rows,
    TableOf,
    Verdict,
)
from flopwise.experiments.steadiness import GPU, WALL, Ratio, left_open, span, times, together, word
from flopwise.records.experiment import Place

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

CLAIM = "A launch costs microseconds whatever the size: a small operation is mostly launch, and a CUDA graph saves most of it."
EMPTY, ALONE, QUEUED, GRAPH = "empty kernel", "add, waited for", "adds, queued", "adds in a CUDA graph"
SMALL = (1, 2048)  # numbers; the lecture's vector is the second
LARGE = 2048 * 2048  # the lecture's: two matrices of 2048 × 2048
MICROSECONDS = 50_000  # ns: a launch that costs more does not cost 'microseconds'
WHATEVER = 3.0  # times from the cheapest launch to the dearest: more is not 'whatever the size'
IN_GRAPH = 50  # adds in one graph
MOSTLY = 0.5  # of the time


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    from flopwise import torch_private

    if bench.on_gpu:
        # A kernel that spins for one cycle: the nearest to none that torch can launch.
        yield {"how": EMPTY, "n": 0, "moved_bytes": 0, **bench.time(lambda: torch_private.spin(1)).row()}
    powers = range(0, 23, 11) if bench.quick else range(0, 23, 2)
    for n in sorted({2**power for power in powers} | {2048, LARGE}):
        bench.doing(f"adding {n} numbers")
        a, b = (torch.rand(n, device=bench.device) for _ in range(2))
        out = torch.empty_like(a)

        add = partial(torch.add, a, b, out=out)
        about = {"n": n, "moved_bytes": 3 * a.nbytes}
        yield {"how": QUEUED, **about, **bench.time(add).row()}
        if bench.on_gpu:
            yield {"how": ALONE, **about, **bench.time(add, repeats=1).row()}
            graph = bench.graphed(lambda add=add: [add() for _ in range(IN_GRAPH)])  # type: ignore[misc]
            yield {"how": GRAPH, **about, **_per_add(bench.time(graph).row())}


def _per_add(row: Row) -> Row:
    return {key: value / IN_GRAPH if key.endswith("_ns") and value is not None else value for key, value in row.items()}


def host_share(row: Mapping[str, Any]) -> float | None:
    """The share of the wall time in which the GPU had nothing to do; None on the CPU.

    >>> host_share({"wall_ns": 100.0, "gpu_ns": 20.0})
    0.8
    """
    return None if row["gpu_ns"] is None else max(0.0, 1 - row["gpu_ns"] / row["wall_ns"])


def judge(rows: Rows, place: Place) -> Verdict:
    found = {(row["how"], row["n"]): row for row in rows}
    ways = (QUEUED, ALONE, GRAPH) if place.on_gpu else (QUEUED,)
    needed = [(how, n) for how in ways for n in (*SMALL, LARGE)] + ([(EMPTY, 0)] if place.on_gpu else [])
    if missing := [f"{how} of {n}" for how, n in needed if (how, n) not in found]:
        return Verdict(INCONCLUSIVE, f"not measured: {', '.join(missing)}.")
    if place.on_gpu:
        return _on_gpu(rows, found)
    small, large = found[QUEUED, SMALL[0]], found[QUEUED, LARGE]
    share = small["wall_ns"] / large["wall_ns"]
    return Verdict(
        NOT_MEASURABLE,
        f"a CPU has no launches: a call costs {units.duration(small['wall_ns'])} here (an add of one number), "
        f"{units.percent(share)} of the {units.duration(large['wall_ns'])} of an add of 2048 × 2048.",
    )


def _on_gpu(rows: Rows, found: Mapping[tuple[str, int], Mapping[str, Any]]) -> Verdict:
    empty = found[EMPTY, 0]
    launches = [row["launch_ns"] for row in rows if row["how"] == QUEUED]
    waited = [found[ALONE, n]["launch_ns"] for n in (*SMALL, LARGE)]
    shares = {n: host_share(found[ALONE, n]) or 0.0 for n in (*SMALL, LARGE)}
    saved = {n: times(found[GRAPH, n], found[QUEUED, n], "wall_ns") for n in SMALL}
    answer = together(
        all(0 < ns <= MICROSECONDS for ns in (empty["launch_ns"], *launches, *waited)),
        max(launches) <= WHATEVER * min(launches),
        *(_works(found[ALONE, n]).within(most=1 - MOSTLY) for n in SMALL),
        *(saved[n].within(most=1 - MOSTLY) for n in SMALL),
    )
    one, lectures = SMALL
    said = (
        f"an empty kernel costs the host {units.duration(empty['launch_ns'])}, an add {units.duration(min(launches))} to "
        f"{units.duration(max(launches))} from one number to 2048 × 2048. Of an add of {lectures} numbers that is waited for, at "
        f"least {units.percent(shares[lectures], 0)} is not the GPU's work (of one number {units.percent(shares[one], 0)}, of "
        f"2048 × 2048 {units.percent(shares[LARGE], 0)}). It takes {units.duration(found[QUEUED, lectures]['wall_ns'])} when "
        f"queued and {units.duration(found[GRAPH, lectures]['wall_ns'])} in a CUDA graph: "
        f"{units.percent(1 - saved[lectures].middle, 0)} saved."
    )
    if answer is None:
        said += " " + left_open(
            ((f"{how}, {n}", found[how, n]) for how in (QUEUED, ALONE, GRAPH) for n in SMALL), "wall_ns"
        )
    return Verdict(word(answer), said)


def _works(row: Mapping[str, Any]) -> Ratio:
    """The share of the wall time in which the GPU works, and between what it lies."""
    (least, most), (low, high) = span(row, GPU), span(row, WALL)
    return Ratio(row[GPU] / row[WALL], least / high, most / low if low > 0 else math.inf)


def draw(rows: Rows, place: Place) -> list[Picture]:
    adds = [row for row in rows if row["n"]]
    pictures = [
        Picture(
            title="Time of an elementwise add by its size",
            caption="Flat on the left: the cost of the call. Rising on the right: the cost of the bytes.",
            kind="line", rows=adds, x="n", y="wall_ns", colour="how", low="wall_low_ns", high="wall_high_ns",
            x_title="numbers added", y_title="time per add", x_log=True, y_log=True,
        )
    ]  # fmt: skip
    if place.on_gpu:
        shares = [{**row, "host_share": host_share(row)} for row in adds]
        pictures.append(
            Picture(
                title="Share of an add's time in which the GPU does not work", kind="line", rows=shares, x="n",
                caption="At least: the GPU's time holds the cost of its clock, which many adds in a row share.",
                y="host_share", colour="how", x_title="numbers added", y_title="not the GPU's work", x_log=True,
            )
        )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {"how": "what", "n": "numbers", "moved_bytes": "moved", "wall_ns": "wall"}
    if place.on_gpu:
        columns |= {"launch_ns": "launch", "gpu_ns": "GPU", "host_share": "not the GPU's work"}
    notes = ("GPU: with the clock's own cost, which many adds in a row share; not the GPU's work: so much at least",)
    told = [{**row, "host_share": host_share(row)} for row in rows]
    return [TableOf("time per operation", columns, told, notes if place.on_gpu else ())]


EXPERIMENT = Experiment(
    name="launch-overhead",
    number=3,
    line="What an empty launch costs, the CPU's share of an elementwise add, and how a CUDA graph changes it.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
