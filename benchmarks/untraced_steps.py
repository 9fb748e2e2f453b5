"""What a profiler costs the host: fitted on steps that were measured with and without it; the estimate's error.

    python benchmarks/untraced_steps.py [RUN…] > benchmarks/results/untraced-2026-11.md

The pairs: the fixtures of tests/trace, the course's training steps (results/h200-traces-2026-11/answers.csv), the runs of
`flopwise profile` or `tune` in benchmarks/results and on the command line that keep their trace; and those of `untraced_pairs.py`
whose host sets the pace (results/untraced-2026-11/*.npz). The course's traces are not kept: each is stood for by the fixture of
the same profiler and the same model at another size, its host and its GPU made slower until the replay takes as long as that
traced step and is busy as long. Of every pair, the cost of an event is solved for at which the replay takes as long as the
untraced step; the fit is the median. A step that the GPU sets without the profiler says only what it costs at least. The range
goes from the cheapest to the dearest, these included.
"""

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from flopwise.analysis.explanation import host_clock
from flopwise.analysis.profiler_cost import COSTS, NO_COST, ProfilerCost
from flopwise.analysis.traced_steps import traced_steps
from flopwise.analysis.untraced import HostTimeline, host_timeline, replay
from flopwise.records.run import STEP
from flopwise.store import StoredRun
from flopwise.trace.read import read_trace

RESULTS = Path(__file__).parent / "results"
FIXTURES = Path(__file__).parents[1] / "tests" / "trace" / "fixtures"
# Untraced: the same step on the same machine (docs/explanation/waterfall.md); of the compiled one, a run of the same recipe on
# another machine of the kind (results/h200-2026-11-tune-beside/small-4x512).
KNOWN_MS = {
    "h200-small-fp32-naive-2steps.kineto.json.gz": 65.0,
    "h200-small-fp32-naive-2steps.nsys.sqlite.gz": 65.0,
    "h200-small-bf16-compiled-2steps.kineto.json.gz": 22.0,
}
STANDS_FOR = {
    "kineto": "h200-small-fp32-naive-2steps.kineto.json.gz",
    "nsys": "h200-small-fp32-naive-2steps.nsys.sqlite.gz",
}
HOST_SETS = 0.7  # of the traced step: a GPU busy for less waits for its host
MOST = 6.0  # units an event: solved for between 0 and this
SHOWN, NEAR = (
    0.01,
    0.10,
)  # of the step: a shorter replay shows that the host mattered; an estimate so near is a good one


@dataclass
class Pair:
    """A step with and without a profiler, per step."""

    name: str
    profiler: str
    traced_ns: float
    busy_ns: float
    untraced_ns: float
    host: HostTimeline
    n: int

    def estimate(self, event: float) -> float:
        """As analysis.untraced.estimate."""
        zero, ns = (replay(self.host, ProfilerCost(event=cost))[0] / self.n for cost in (0.0, event))
        return min(self.traced_ns, max(self.busy_ns, self.traced_ns - (zero - ns)))

    @property
    def host_sets(self) -> bool:
        """Whether the GPU waited for the host while traced: otherwise nothing tells the host's cost."""
        return self.busy_ns < HOST_SETS * self.traced_ns

    @cached_property
    def cost(self) -> float | None:
        """Units an event at which the estimate is right; None where the GPU sets the untraced step, at any cost."""
        if not self.host_sets or not (1 + SHOWN) * self.estimate(MOST) < self.untraced_ns < self.traced_ns:
            return None
        return solved(lambda event: -self.estimate(event), -self.untraced_ns, 0.0, MOST)

    @cached_property
    def least_cost(self) -> float | None:
        """Where the GPU sets the untraced step: units at which the estimate is within NEAR of it."""
        if not self.host_sets or self.cost is not None:
            return None
        return solved(lambda event: -self.estimate(event), -(1 + NEAR) * self.untraced_ns, 0.0, MOST)


def solved(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a rising function has a value, by halving."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def slowed(host: HostTimeline, by: float, gpu: float) -> HostTimeline:
    """The same step with a slower host and a slower GPU."""
    names = ("unit_ns", "recorded", "launch", "ready", "wait", "gpu_free", "closed", "end")
    times = {name: getattr(host, name) * by for name in names}
    return replace(host, **times, work=host.work * gpu, python_calls=host.python_calls / by)


def of_file(path: Path, untraced_ns: float, name: str = "") -> Pair:
    part = traced_steps(read_trace(path))
    host, n = host_timeline(part), len(part.steps)
    assert host is not None
    window = part.high_ns - part.low_ns
    busy = window - part.idle.total_ns
    return Pair(name or path.name, part.trace.source, window / n, busy / n, untraced_ns, host, n)


def of_answers(fixtures: dict[str, Pair]) -> Iterator[Pair]:
    """The course's training steps. A host that the GPU held up while traced was as fast as it was in the other steps."""
    with open(RESULTS / "h200-traces-2026-11" / "answers.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["case"].endswith("-train")]
    for profiler, name in STANDS_FOR.items():
        base = fixtures[name]
        mine = [row for row in rows if row["profiler"] == profiler]
        numbers = [
            [float(row[key]) for key in ("step_traced_ns", "step_untraced_ns", "gpu_busy_ns", "launches")]
            for row in mine
        ]
        usual = median(traced / launches for traced, _, busy, launches in numbers if busy < HOST_SETS * traced)
        for row, (traced, untraced, busy, launches) in zip(mine, numbers, strict=True):
            gpu = busy / base.busy_ns

            def took(by: float, base: Pair = base, gpu: float = gpu) -> float:
                return replay(slowed(base.host, by, gpu), NO_COST)[0] / base.n

            slowest, as_usual = solved(took, traced, 0.01, 100.0), usual * launches / base.traced_ns
            by = slowest if busy < HOST_SETS * traced else min(slowest, as_usual)
            yield Pair(row["case"], profiler, traced, busy, untraced, slowed(base.host, by, gpu), base.n)


def of_runs(runs: list[str]) -> Iterator[Pair]:
    kept = [path.parent for path in sorted(RESULTS.glob("*/*/traces"))]
    for folder in (*kept, *map(Path, runs)):
        stored = StoredRun.load(folder)
        for point in stored.points:
            path = folder / "traces" / Path(point.trace_file).name
            clock = host_clock(point)
            if point.trace_file and path.exists() and STEP in clock:
                yield of_file(path, clock[STEP], f"{folder.name} {path.name.partition('.')[0]}")


def stored(path: Path) -> Pair:
    """A pair as `untraced_pairs.py` left it."""
    with np.load(path, allow_pickle=False) as file:
        fields = {key: value if value.ndim else value.item() for key, value in file.items()}
    host = HostTimeline(**{key[5:]: value for key, value in fields.items() if key.startswith("host_")})
    times = {key: fields[key] for key in ("profiler", "traced_ns", "busy_ns", "untraced_ns", "n")}
    return Pair(name=path.stem, host=host, **times)


def known(pairs: list[Pair]) -> list[float]:
    return [pair.cost for pair in pairs if pair.cost is not None]


def row(pair: Pair, found: float) -> str:
    times = " | ".join(f"{ns / 1e6:.1f}" for ns in (pair.traced_ns, pair.busy_ns, pair.untraced_ns))
    cost, least = pair.cost, pair.least_cost
    shown = f"{cost:.2f}" if cost is not None else f"at least {least:.2f}" if least is not None else ""
    off = " | ".join(f"{ns / pair.untraced_ns - 1:+.0%}" for ns in (found, pair.traced_ns))
    return f"| {pair.name} | {times} | {shown} | {found / 1e6:.1f} | {off} |"


def summary(profiler: str, pairs: list[Pair], left_out: dict[str, float]) -> str:
    """The fit, what is in use, and errors: of all pairs, and of those in which the GPU waited for the host."""
    exact = known(pairs)
    most = max([*exact, *(pair.least_cost for pair in pairs if pair.least_cost is not None)])
    used = COSTS[profiler]
    fits = ", ".join(f"{one:.2f}" for one in (min(exact), median(exact), most))
    uses = ", ".join(f"{one.event:.1f}" for one in (used.least, used.likely, used.most))
    cells = []
    for chosen in (pairs, [pair for pair in pairs if pair.host_sets]):
        for ns in (lambda pair: left_out[pair.name], lambda pair: pair.traced_ns):
            off = [abs(ns(pair) / pair.untraced_ns - 1) for pair in chosen]
            cells.append(f"{median(off):.1%}, {max(off):.0%}")
    return f"| {profiler} | {len(pairs)}, {len(exact)} | {fits} | {uses} | {' | '.join(cells)} |"


def before_the_fit() -> None:
    """What flopwise said of the pairs of `untraced_pairs.py` on the day, by costs that were fitted without them."""
    with open(RESULTS / "untraced-2026-11" / "pairs.csv") as file:
        rows = list(csv.DictReader(file))
    print(
        "\n**Said before these were fitted** (pairs.csv; by costs of 0.6, 1.8 and 2.1 units, nsys 2.0, 2.6 and 4.2)\n"
    )
    print(
        "| pairs | error of the estimate, median, largest | within its range | called launch-bound, GPU's share of each |"
    )
    print("| :--- | ---: | ---: | :--- |")
    for name, ends in (
        ("with shapes", "-shapes"),
        ("without", "-bare"),
        ("with stacks", "-stacks"),
        ("nsys", "-nsys"),
        ("all", ""),
    ):
        mine = [row for row in rows if row["pair"].endswith(ends)]
        told = [{key: float(row[f"{key}_ms"]) for key in ("untraced", "estimate", "low", "high")} for row in mine]
        off = [abs(one["estimate"] / one["untraced"] - 1) for one in told]
        inside = sum(0.99 * one["low"] <= one["untraced"] <= 1.01 * one["high"] for one in told)
        called = sorted(float(row["gpu_share_of_untraced"]) for row in mine if row["called_launch_bound"] == "True")
        shares = ", ".join(f"{share:.0%}" for share in called)
        print(f"| {name} | {median(off):.1%}, {max(off):.0%} | {inside} of {len(mine)} | {shares} |")


def main() -> None:
    fixtures = {name: of_file(FIXTURES / name, 1e6 * ms) for name, ms in KNOWN_MS.items()}
    pairs = [*fixtures.values(), *of_answers(fixtures), *of_runs(sys.argv[1:])]
    pairs += map(stored, sorted((RESULTS / "untraced-2026-11").glob("*.npz")))
    print("# Steps with and without their profiler\n")
    print("`python benchmarks/untraced_steps.py` says what the pairs are. Costs are units an event, as in")
    print(
        "`src/flopwise/analysis/profiler_cost.py`. Estimates are by the median cost of the *other* pairs of the profiler.\n"
    )
    summaries = []
    for profiler in COSTS:
        mine = [pair for pair in pairs if pair.profiler == profiler]
        print(
            f"**{profiler}**\n\n| step | traced, ms | GPU busy | untraced | cost | estimate | off by | traced is off by |"
        )
        print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        left_out = {}
        for pair in mine:
            left_out[pair.name] = pair.estimate(median(known([other for other in mine if other is not pair])))
            print(row(pair, left_out[pair.name]))
        summaries.append(summary(profiler, mine, left_out))
        print()
    print("**Fit and error** (median, largest). *Host*: the pairs in which the GPU waited for the host while traced.\n")
    heading = "profiler | pairs, with a cost | least, median, most | in use | estimate | traced | host: estimate | host: traced"
    print(f"| {heading} |\n| :--- |{' ---: |' * 7}", *summaries, sep="\n")
    before_the_fit()


if __name__ == "__main__":
    main()
