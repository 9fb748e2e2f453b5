"""`launch-overhead`: what it costs to start work on the device, beside the work.

An elementwise add reads two tensors and writes one. Below some size its time no longer follows the size: what is left is the
cost of the call (Python, the dispatcher, the driver). On a GPU the three clocks tell the two apart, and a CUDA graph of many
adds has one launch for all of them.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.lab.experiment import (
    CONFIRMED,
    NOT_MEASURABLE,
    REFUTED,
    Experiment,
    Picture,
    Place,
    Row,
    Rows,
    TableOf,
    Verdict,
)

if TYPE_CHECKING:
    from flopwise.lab.bench import Bench

CLAIM = "A launch costs microseconds whatever the size: a small operation is mostly launch, and a CUDA graph saves most of it."
EMPTY, ALONE, QUEUED, GRAPH = "empty kernel", "add, waited for", "adds, queued", "adds in a CUDA graph"
LARGE = 2048 * 2048  # the lecture's: two matrices of 2048 × 2048
IN_GRAPH = 50  # adds in one graph
MOSTLY = 0.5  # of the time


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    if bench.on_gpu:
        # A kernel that spins for one cycle: the nearest to none that torch can launch.
        yield {"how": EMPTY, "n": 0, "moved_bytes": 0, **bench.time(lambda: torch.cuda._sleep(1)).row()}
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


def _one(rows: Rows, how: str, n: int) -> Mapping[str, Any]:
    return next(row for row in rows if row["how"] == how and row["n"] == n)


def judge(rows: Rows, place: Place) -> Verdict:
    small, large = _one(rows, QUEUED, 1), _one(rows, QUEUED, LARGE)
    if not place.on_gpu:
        share = small["wall_ns"] / large["wall_ns"]
        return Verdict(
            NOT_MEASURABLE,
            f"a CPU has no launches: a call costs {units.duration(small['wall_ns'])} here (an add of one number), "
            f"{units.percent(share)} of the {units.duration(large['wall_ns'])} of an add of 2048 × 2048.",
        )
    empty, graph, alone = _one(rows, EMPTY, 0), _one(rows, GRAPH, 1), _one(rows, ALONE, LARGE)
    of_small, of_large = host_share(_one(rows, ALONE, 1)) or 0.0, host_share(alone) or 0.0
    saved = 1 - graph["wall_ns"] / small["wall_ns"]
    holds = of_small > MOSTLY and saved > MOSTLY
    return Verdict(
        CONFIRMED if holds else REFUTED,
        f"an empty kernel costs the host {units.duration(empty['launch_ns'])}; of an add of one number that is waited for, "
        f"{units.percent(of_small, 0)} is not the GPU's work, of one of 2048 × 2048 {units.percent(of_large, 0)}. "
        f"A small add takes {units.duration(small['wall_ns'])} when queued and {units.duration(graph['wall_ns'])} in a CUDA "
        f"graph: {units.percent(saved, 0)} saved.",
    )


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
                y="host_share", colour="how", x_title="numbers added", y_title="not the GPU's work", x_log=True,
            )
        )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {"how": "what", "n": "numbers", "moved_bytes": "moved", "wall_ns": "wall"}
    if place.on_gpu:
        columns |= {"launch_ns": "launch", "gpu_ns": "GPU", "host_share": "not the GPU's work"}
    return [TableOf("time per operation", columns, [{**row, "host_share": host_share(row)} for row in rows])]


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
