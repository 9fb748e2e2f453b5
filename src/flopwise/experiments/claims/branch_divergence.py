"""`branch-divergence`: the 32 threads of a warp share one instruction; what each branch does costs all of them its time.

Every thread takes one of k branches, each with the same work. Once the branches differ within each warp, once only between warps:
the same branches, the same work, other neighbours. And a loop that makes 1 to 32 rounds, with neighbours of any length or of
the same.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, bar, columns, line, table_of
from flopwise.experiments.rows import Interval, Timed, by, fields, select, values
from flopwise.experiments.verdict import Check, least_certain, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "Branches that differ within a warp against branches that differ between warps: the time of the same work."
CLAIM = (
    "Threads of a warp that branch differently wait for each other: k branches within a warp take about k times as long, and "
    "between warps no longer than one."
)
WITHIN, BETWEEN = SPLITS = ("within warps", "between warps")
PATHS = (1, 2, 4, 8, 16, 32)
WARP, THREADS, COUNT = 32, 256, 2**21  # threads of a warp, of a block, of all
STEPS, ROUND = 1024, 64  # multiplications of a branch, of a loop's round
GROWTH, ADDED = 0.999, 0.5  # x becomes GROWTH x + ADDED; a branch's growth is less by 0.001 for each before it
ABOUT = (0.75, 1.25)  # of k times
FREE = 1.2  # times as long as one branch
TEST = 0.01  # of a branch: every warp tests all branches, some ten instructions of a thousand each
WRONG = 0.01  # relative: rounding leaves less
SOURCE = Path(__file__).with_suffix(".cu")


class Branches(Timed, frozen=True, kw_only=True, tag_field="part", tag="branches"):
    split: str
    paths: int
    off: float  # of the mean result, relative


class Loops(Timed, frozen=True, kw_only=True, tag_field="part", tag="loops"):
    split: str
    off: float


Rows = Sequence[Branches | Loops]


def measure(bench: "Bench") -> Iterator[Branches | Loops]:
    import torch

    from flopwise.kernels.nvrtc import pointer

    bench.needs_gpu("a warp")
    constants = {"THREADS": THREADS, "STEPS": STEPS, "ROUND": ROUND}
    branches, loops = bench.cuda_kernels(SOURCE.read_text(), SOURCE.name, ("branches", "loops"), **constants)
    out, blocks, seconds = torch.empty(COUNT, device=bench.device), COUNT // THREADS, 0.03 if bench.quick else 0.1
    for split in SPLITS:
        for paths in PATHS:
            bench.doing(f"{paths} branches {split}")
            group = ctypes.c_int(1 if split == WITHIN else WARP)
            given = (pointer(out), ctypes.c_int(paths), group)
            timing = bench.time(partial(branches, blocks, THREADS, *given), seconds=seconds)
            off = relative_error(float(out.double().mean()), [(n, STEPS) for n in range(paths)])
            yield Branches(split=split, paths=paths, off=off, **fields(timing))
        bench.doing(f"loops that differ {split}")
        # Between blocks: when the short loops of a block have ended, another block can have their place.
        each = (pointer(out), ctypes.c_int(1 if split == WITHIN else THREADS))
        timing = bench.time(partial(loops, blocks, THREADS, *each), seconds=seconds)
        off = relative_error(float(out.double().mean()), [(0, ROUND * (n + 1)) for n in range(WARP)])
        yield Loops(split=split, off=off, **fields(timing))


def relative_error(mean: float, chains: Sequence[tuple[int, int]]) -> float:
    """How far a mean is from that of chains, each a branch and its steps: n steps of x → g x + a give L + (1 − L) gⁿ.

    >>> relative_error(GROWTH * 1.0 + ADDED, [(0, 1)]) < 1e-12
    True
    """
    right = 0.0
    for branch, steps in chains:
        growth = GROWTH - 0.001 * branch
        limit = ADDED / (1 - growth)
        right += (limit + (1 - limit) * growth**steps) / len(chains)
    return abs(mean / right - 1)


def _slower(rows: Rows) -> dict[tuple[str, int], Interval]:
    """How many times as long as one branch, by split and branches; {} without that one."""
    found = by(select(rows, Branches), "split", "paths")
    base = found.get((BETWEEN, 1)) or found.get((WITHIN, 1))
    return {key: row.device / base.device for key, row in found.items()} if base else {}


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    slower, loops = _slower(rows), by(select(rows, Loops), "split")
    complete = len(slower) == len(SPLITS) * len(PATHS) and set(SPLITS) == set(loops)
    yield require("all branches", complete, f"only {len(slower)} of {len(SPLITS) * len(PATHS)} were measured.")
    wrong = ", ".join(f"{row.off:.2g}" for row in rows if not row.off <= WRONG)
    yield require("right results", not wrong, f"results are off by {wrong}.")
    most = PATHS[-1]
    uneven = loops[WITHIN].device / loops[BETWEEN].device
    yield said(
        f"2 branches take {slower[WITHIN, 2].middle:.2f} and {most} take {slower[WITHIN, most].middle:.1f} times as long as "
        f"one when they differ within warps, {slower[BETWEEN, 2].middle:.2f} and {slower[BETWEEN, most].middle:.2f} times when "
        f"they differ between warps. Loops of 1 to {WARP} rounds take {uneven.middle:.2f} times as long mixed in each warp as "
        f"sorted ({longest_over_mean():.2f} if a warp waits for its longest)."
    )
    times = {str(k): slower[WITHIN, k].around(slower[WITHIN, k].middle / k) for k in PATHS[1:]}
    yield within("k times within", times, *ABOUT, refuted="Not about k times: {} branches.")
    free = {str(k): slower[BETWEEN, k].around(slower[BETWEEN, k].middle - TEST * (k - 1)) for k in PATHS}
    yield within("free between", free, most=FREE, refuted="Not free between warps: {} branches.")
    yield least_certain({f"{row.paths} branches {row.split}": row for row in select(rows, Branches)})


def longest_over_mean() -> float:
    """Of loops of 1 to 32 rounds.

    >>> round(longest_over_mean(), 2)
    1.94
    """
    return WARP / ((WARP + 1) / 2)


def _shown(rows: Rows) -> list[dict[str, Any]]:
    slower = _slower(rows)
    found = []
    for row in values(select(rows, Branches), "took_ns"):
        ratio = slower.get((row["split"], row["paths"]))
        lanes = 1 / row["paths"] if row["split"] == WITHIN else 1.0
        found.append(row | {"times": ratio.middle if ratio else None, "active_share": lanes})
    return found


def draw(rows: Rows, place: Place) -> list[Picture]:
    loops = values(select(rows, Loops), "took_ns")
    shown = [row | {"branches": str(row["paths"])} for row in _shown(rows)]
    return [
        line(shown, Axis("branches", "branches"), Axis("took_ns", "time", log=True), colour="split").titled(
            "Time of the same work by the number of branches",
            "Within a warp each branch takes its turn. Warps that branch as a whole do not wait for each other.",
        ),
        bar(loops, Axis("split", "neighbours differ"), Axis("took_ns", "time")).titled(
            "Loops of 1 to 32 rounds", "A warp takes as long as its longest loop."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    branches = columns(split="branches differ", paths="branches", gpu_ns="GPU", times="times one branch")
    branches |= columns(active_share="threads at work", off="error")
    loops = columns(split="loops differ", gpu_ns="GPU", off="error")
    note = f"{units.count(COUNT)} threads, {STEPS} multiplications and additions each"
    return [
        table_of("branches", branches, _shown(rows), (note,)),
        table_of("loops of 1 to 32 rounds", loops, values(select(rows, Loops))),
    ]


EXPERIMENT = Experiment(17, "branch-divergence", LINE, CLAIM, (Branches, Loops), measure, judge, draw, tabulate)
