"""`warmup`: what 0, 1, 2 and 5 warm-up steps do to the mean of ten and to its spread.

A process is cold once: it loads kernels, fills the allocator's cache and picks algorithms in its first steps. So every start is a
process of its own, which times its steps from the very first; the means after 0, 1, 2 or 5 steps all come from the same steps.
The steady step, to which they are compared, is the median of the last ten.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError, one_line
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, bar, columns, line, table_of
from flopwise.experiments.rows import Row, fields, values
from flopwise.experiments.verdict import REFUTED, Check, holds, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table
from flopwise.spec.workload import Workload, workload

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "What 0, 1, 2 and 5 warm-up steps do to the mean of ten steps and to its spread."
CLAIM = "Without warm-up steps the mean of ten steps is too high and its spread is wide; a few warm-up steps cure both."
WARMUPS = (0, 1, 2, 5)
TIMED = 10  # steps in a mean
STEPS = max(WARMUPS) + 2 * TIMED
TOO_HIGH = 0.05  # above the steady step, by this share of it
WIDE = 0.1  # of the mean: steps that spread by more after the warm-up are not cured
APART = 0.25  # of the shortest steady step: starts that differ by more were not on a machine in the same state


class Step(Row, frozen=True, kw_only=True):
    start: int
    step: int
    wall_ns: float
    workload: str


class Summary(Row, frozen=True):
    """After so many warm-up steps: the mean of the ten steps that follow, its spread, its error; medians of all starts."""

    warmups: int
    mean_ns: float
    spread_ns: float
    steady_ns: float
    off_share: float
    spread_share: float
    steady_spread_share: float
    apart_share: float  # of the starts' steady steps
    starts: int


Rows = Sequence[Step]


def measure(bench: "Bench") -> Iterator[Step]:
    chosen = bench.workload or (workload("small") if bench.on_gpu else workload("tiny", batch=2))
    asked = msgspec.json.encode({"workload": chosen, "device": str(bench.device)})
    for start in range(1, (1 if bench.quick else 5) + 1):
        bench.doing(f"start {start}, in a new process")
        # -c, not -m: as __main__ this file would be another module than the one in the catalogue.
        code = f"from {__name__} import cold_start; cold_start()"
        ended = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, check=False)
        if ended.returncode:
            last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise FlopwiseError(one_line(f"a cold start failed: {' '.join(last)}"))
        for step, wall_ns in enumerate(msgspec.json.decode(ended.stdout.splitlines()[-1], type=list[int])):
            yield Step(start=start, step=step, wall_ns=wall_ns, workload=chosen.label())


class _Asked(msgspec.Struct):
    workload: Workload
    device: str


def cold_start() -> None:
    """In a process that has run nothing yet: the wall times of the first steps, as JSON on standard output."""
    from flopwise.capture.build import build_step, resolve_device
    from flopwise.capture.clock import clock_for
    from flopwise.keeper import die_with_parent

    die_with_parent()  # an experiment that is ended takes its cold start along
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    device = resolve_device(asked.device)
    step = build_step(asked.workload, device)
    clock = clock_for(step.phases, device, single_op=False)
    times = [clock.once() for _ in range(STEPS)]
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(times))  # after whatever a step of the user's own has printed


def summaries(rows: Rows) -> list[Summary]:
    """For each number of warm-up steps; a start that was cut off is left out."""
    starts: dict[int, list[float]] = {}
    for row in rows:
        starts.setdefault(row.start, []).append(row.wall_ns)
    whole = [walls for walls in starts.values() if len(walls) >= STEPS]
    return [_summary(warmups, whole) for warmups in WARMUPS] if whole else []


def _summary(warmups: int, starts: Sequence[Sequence[float]]) -> Summary:
    timed, last = [walls[warmups : warmups + TIMED] for walls in starts], [walls[-TIMED:] for walls in starts]
    means, spreads = [mean(walls) for walls in timed], [stdev(walls) for walls in timed]
    steadies = [median(walls) for walls in last]
    off = median(one / steady - 1 for one, steady in zip(means, steadies, strict=True))
    spread = median(spread / one for spread, one in zip(spreads, means, strict=True))
    steady_spread = median(stdev(walls) / mean(walls) for walls in last)
    apart = max(steadies) / min(steadies) - 1
    medians = (median(means), median(spreads), median(steadies))
    return Summary(warmups, *medians, off, spread, steady_spread, apart, len(starts))


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    by_count = {row.warmups: row for row in summaries(rows)}
    yield require("a whole start", by_count, f"no start has all of its {STEPS} steps.")
    none, most = by_count[0], by_count[max(WARMUPS)]
    yield said(
        f"with no warm-up the mean of {TIMED} steps is {units.percent(none.off_share)} off the steady "
        f"{units.duration(none.steady_ns)} and spreads by {units.percent(none.spread_share)}; after {max(WARMUPS)} it is "
        f"{units.percent(most.off_share)} off and spreads by {units.percent(most.spread_share)} "
        f"(cold starts: {none.starts})."
    )
    yield require(
        "starts agree",
        none.apart_share <= APART,
        f"Too uncertain to tell: the steady step of one start is {units.percent(none.apart_share, 0)} longer than that of "
        "another.",
    )
    # A mean of ten and the median of ten others differ by chance by half the spread of a step, and seldom by twice that.
    chance = none.steady_spread_share
    yield require("the mean is too high", none.off_share + chance >= TOO_HIGH, "", REFUTED)
    cured = abs(most.off_share) < TOO_HIGH and most.spread_share < min(none.spread_share, WIDE)
    wide = f"So {max(WARMUPS)} warm-up steps do not cure the spread here."
    noise = f"Too uncertain to tell: steady steps spread by {units.percent(chance)} themselves."
    clear = none.off_share - chance >= TOO_HIGH and cured
    yield holds("cured", True if clear else None, unknown=wide if most.spread_share >= WIDE > chance else noise)


def draw(rows: Rows, place: Place) -> list[Picture]:
    means: list[dict[str, Any]] = [
        fields(row) | {"low_ns": max(0.0, row.mean_ns - row.spread_ns), "high_ns": row.mean_ns + row.spread_ns}
        for row in summaries(rows)
    ]
    steady = tuple(Rule("y", row["steady_ns"], "steady") for row in means[:1])
    steps = [fields(row) | {"start": f"start {row.start}"} for row in rows]
    spread = Axis("mean_ns", "mean", interval=("low_ns", "high_ns"))
    return [
        line(
            steps, Axis("step", "step"), Axis("wall_ns", "time of the step", log=True), colour="start", rules=steady
        ).titled("Every step from a cold start", "The first ones load kernels and fill caches."),
        bar(means, Axis("warmups", "warm-up steps"), spread, rules=steady).titled(
            "Mean of ten steps after some warm-up steps", "The thin line is one standard deviation to each side."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns(warmups="warm-up steps", mean_ns="mean of ten", spread_ns="standard deviation")
    headings |= columns(off_share="error", spread_share="spread", steady_ns="steady step")
    title = f"a training step of {rows[0].workload}, cold starts: {max(row.start for row in rows)}"
    return [table_of(title, headings, values(summaries(rows)))]


EXPERIMENT = Experiment(16, "warmup", LINE, CLAIM, (Step,), measure, judge, draw, tabulate, takes_workload=True)
