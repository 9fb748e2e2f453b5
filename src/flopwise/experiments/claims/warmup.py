"""`warmup`: what 0, 1, 2 and 5 warm-up steps do to the mean of ten and to its spread.

A process is cold once: it loads kernels, fills the allocator's cache and picks algorithms in its first steps. So every start is a
process of its own, which times its steps from the very first; the means after 0, 1, 2 or 5 steps all come from the same steps.
The steady step, to which they are compared, is the median of the last ten.
"""

import subprocess
import sys
from collections.abc import Iterator
from statistics import mean, median, stdev
from typing import TYPE_CHECKING

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError, one_line
from flopwise.experiments.experiment import (
    CONFIRMED,
    INCONCLUSIVE,
    REFUTED,
    Experiment,
    Picture,
    Row,
    Rows,
    Rule,
    TableOf,
    Verdict,
)
from flopwise.records.experiment import Place
from flopwise.spec.workload import Workload, workload

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

CLAIM = "Without warm-up steps the mean of ten steps is too high and its spread is wide; a few warm-up steps cure both."
WARMUPS = (0, 1, 2, 5)
TIMED = 10  # steps in a mean
STEPS = max(WARMUPS) + 2 * TIMED
TOO_HIGH = 0.05  # above the steady step, by this share of it
WIDE = 0.1  # of the mean: steps that spread by more after the warm-up are not cured
APART = 0.25  # of the shortest steady step: starts that differ by more were not on the same machine, so to say


def measure(bench: "Bench") -> Iterator[Row]:
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
            yield {"start": start, "step": step, "wall_ns": wall_ns, "workload": chosen.label()}


class _Asked(msgspec.Struct):
    workload: Workload
    device: str


def cold_start() -> None:
    """In a process that has run nothing yet: the wall times of the first steps, as JSON on standard output."""
    from flopwise.capture.build import build_step, resolve_device
    from flopwise.capture.clock import clock_for
    from flopwise.capture.pipes import die_with_parent

    die_with_parent()  # an experiment that is ended takes its cold start along
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    device = resolve_device(asked.device)
    step = build_step(asked.workload, device)
    clock = clock_for(step.phases, device, single_op=False)
    times = [clock.once() for _ in range(STEPS)]
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(times))  # after whatever a step of the user's own has printed


def summaries(rows: Rows) -> list[Row]:
    """For each number of warm-up steps: the mean of the ten steps after them, its spread, how far it is off; over all starts.

    A start that was cut off is left out.
    """
    starts: dict[int, list[float]] = {}
    for row in rows:
        starts.setdefault(row["start"], []).append(row["wall_ns"])
    whole = [walls for walls in starts.values() if len(walls) >= STEPS]
    told: list[Row] = []
    for warmups in WARMUPS if whole else ():
        found = [(walls[warmups : warmups + TIMED], median(walls[-TIMED:])) for walls in whole]
        means = [mean(timed) for timed, _ in found]
        steadies = [steady for _, steady in found]
        told.append(
            {
                "warmups": warmups,
                "mean_ns": median(means),
                "spread_ns": median(stdev(timed) for timed, _ in found),
                "steady_ns": median(steadies),
                "off_share": median(mean(timed) / steady - 1 for timed, steady in found),
                "spread_share": median(stdev(timed) / mean(timed) for timed, _ in found),
                "steady_spread_share": median(stdev(walls[-TIMED:]) / mean(walls[-TIMED:]) for walls in whole),
                "apart_share": max(steadies) / min(steadies) - 1,
                "starts": len(found),
            }
        )
    return told


def judge(rows: Rows, place: Place) -> Verdict:
    by_count = {row["warmups"]: row for row in summaries(rows)}
    if not by_count:
        return Verdict(INCONCLUSIVE, f"no start has all of its {STEPS} steps.")
    none, most = by_count[0], by_count[max(WARMUPS)]
    said = (
        f"with no warm-up the mean of {TIMED} steps is {units.percent(none['off_share'])} off the steady "
        f"{units.duration(none['steady_ns'])} and spreads by {units.percent(none['spread_share'])}; after {max(WARMUPS)} it is "
        f"{units.percent(most['off_share'])} off and spreads by {units.percent(most['spread_share'])} "
        f"(cold starts: {none['starts']})."
    )
    # A mean of ten and the median of ten others differ by chance by half the spread of a step, and seldom by twice that.
    chance = none["steady_spread_share"]
    if none["apart_share"] > APART:
        return Verdict(
            INCONCLUSIVE,
            f"{said} Too unsteady to tell: the steady step of one start is {units.percent(none['apart_share'], 0)} longer than "
            "that of another.",
        )
    if none["off_share"] + chance < TOO_HIGH:
        return Verdict(REFUTED, said)
    cured = abs(most["off_share"]) < TOO_HIGH and most["spread_share"] < min(none["spread_share"], WIDE)
    if none["off_share"] - chance >= TOO_HIGH and cured:
        return Verdict(CONFIRMED, said)
    if most["spread_share"] >= WIDE > chance:
        return Verdict(INCONCLUSIVE, f"{said} So {max(WARMUPS)} warm-up steps do not cure the spread here.")
    return Verdict(
        INCONCLUSIVE, f"{said} Too unsteady to tell: steady steps spread by {units.percent(chance)} themselves."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    told = summaries(rows)
    steady = tuple(Rule("y", row["steady_ns"], "steady") for row in told[:1])
    ends = [
        {**row, "low_ns": max(0.0, row["mean_ns"] - row["spread_ns"]), "high_ns": row["mean_ns"] + row["spread_ns"]}
        for row in told
    ]
    steps = [{**row, "start": f"start {row['start']}"} for row in rows]
    return [
        Picture(
            title="Every step from a cold start", caption="The first ones load kernels and fill caches.",
            kind="line", rows=steps, x="step", y="wall_ns", colour="start", x_title="step", y_title="time of the step",
            y_log=True, rules=steady,
        ),
        Picture(
            title="Mean of ten steps after some warm-up steps", caption="The thin line is one standard deviation to each side.",
            kind="bar", rows=ends, x="warmups", y="mean_ns", low="low_ns", high="high_ns", x_title="warm-up steps",
            y_title="mean", rules=steady,
        ),
    ]  # fmt: skip


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {
        "warmups": "warm-up steps", "mean_ns": "mean of ten", "spread_ns": "standard deviation", "off_share": "off by",
        "spread_share": "spread", "steady_ns": "steady step",
    }  # fmt: skip
    title = f"a training step of {rows[0]['workload']}, cold starts: {max(row['start'] for row in rows)}"
    return [TableOf(title, columns, summaries(rows))]


EXPERIMENT = Experiment(
    name="warmup",
    number=16,
    line="What 0, 1, 2 and 5 warm-up steps do to the mean of ten steps and to its spread.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
    takes_workload=True,
)
