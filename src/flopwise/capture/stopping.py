"""When warm-up is over and when there are enough samples: rules, not numbers. No torch here."""

import math
import time
from collections.abc import Sequence
from statistics import median

from flopwise.spec.workload import Sampling
from flopwise.statistics import ERROR_RATE, FEWEST, LOOKS, MOST_PAIRS, difference_of_pairs, error_rate_at, estimate

STEADY_WITHIN = 0.02
LEAST_SAMPLES = 10
BUDGET_SAMPLES = 6  # fewer give no interval: a budget that ends before is overrun, but at most fourfold
BUDGET_OVERRUN = 4
LEAST_SECONDS = (
    0.3  # of sampling, unless 100 samples come sooner: one burst of a boosted clock is no sample of a machine
)
MAX_WARMUP_STEPS = 20_000

# Of a comparison. A pair of processes takes a tenth of the seconds; no further one begins after three times the seconds.
PAIR_SHARE, PAIRS_BUDGET = 0.1, 3.0
FEWEST_PAIRS = 3  # whatever the budget
SAME_WITHIN = 0.01  # two that differ by less need no more pairs
FEWEST_ROUNDS, MOST_ROUNDS = 5, 100  # of a pair
DECIDED, PROCESSES, BUDGET = "decided", "processes", "budget"
MUCH_SLOWER, MUCH_SLOWER_ROUNDS, MUCH_SLOWER_RATIO = "much_slower", 2, 2.0
# One pair alone decides for such a ratio: processes of the same code differ by 1.2 % (benchmarks/results/verdicts-2026-11.md).
MUCH_FASTER, MUCH_FASTER_RATIO = "much_faster", 1.15


def steady(walls_ns: Sequence[int], least_ns: int) -> bool:
    """Warm-up is over when its latest window is no faster or slower than the window before, by more than 2 %.

    The window grows with the number of steps, so a slow decline is seen too; `least_ns` of running must have passed,
    because a GPU needs a moment to raise its clocks.

    >>> steady([900, 120, 101, 100, 100, 101, 100, 100], 0), steady([900, 700, 500, 300, 200, 100], 0)
    (True, False)
    """
    window = max(3, len(walls_ns) // 3)
    if len(walls_ns) < 2 * window or sum(walls_ns) < least_ns:
        return False
    before, now = median(walls_ns[-2 * window : -window]), median(walls_ns[-window:])
    return abs(now - before) <= STEADY_WITHIN * before


class WarmupRule:
    """Says after every warm-up step whether warm-up is over, and why: 'steady', 'budget' or 'forced'; '' means go on."""

    def __init__(self, sampling: Sampling, least_ns: int) -> None:
        self.sampling, self.least_ns = sampling, least_ns
        self._deadline, self._next_look = time.perf_counter() + sampling.seconds, 0

    def forced(self, walls_ns: Sequence[int]) -> bool:
        """Whether the user's own number of steps is reached."""
        return self.sampling.warmup is not None and len(walls_ns) >= self.sampling.warmup

    def after(self, walls_ns: Sequence[int]) -> str:
        n = len(walls_ns)
        if self.sampling.warmup is not None:
            return "forced" if self.forced(walls_ns) else ""
        if n >= self._next_look:
            self._next_look = n + max(1, n // 10)  # looking at every tenth keeps the rule cheap
            # The first step holds compilation and lazy initialisation: it is never evidence of a steady state.
            if steady(walls_ns[1:], self.least_ns):
                return "steady"
            if n >= 2 and (time.perf_counter() > self._deadline or n >= MAX_WARMUP_STEPS):
                return "budget"
        if n == 1:
            self._deadline = time.perf_counter() + self.sampling.seconds
        return ""


def half_width(walls_ns: Sequence[int]) -> float:
    """Half the 95 % interval of the median as a share of it: the interval that is shown in the end, too.

    >>> half_width([100] * 20), half_width([100, 200])
    (0.0, inf)
    """
    known = estimate(walls_ns)
    if known.n < FEWEST or known.low is None or known.high is None:
        return math.inf
    return (known.high - known.low) / 2 / max(known.median, 1)


class StoppingRule:
    """Says after every round whether to stop, and why: 'samples', 'precise' or 'budget'; '' means go on."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.walls_ns: list[int] = []
        self._next_look = LEAST_SAMPLES

    def after(self, wall_ns: int, elapsed_s: float) -> str:
        self.walls_ns.append(wall_ns)
        n = len(self.walls_ns)
        if self.sampling.samples is not None:
            return "samples" if n >= self.sampling.samples else ""
        if n >= self._next_look:
            self._next_look = n + max(1, n // 10)  # sorting at every tenth keeps the rule cheap
            enough = elapsed_s >= LEAST_SECONDS or n >= 100
            if enough and half_width(self.walls_ns) <= self.sampling.half_width:
                return "precise"
        budget = self.sampling.seconds * (1 if n >= BUDGET_SAMPLES else BUDGET_OVERRUN)
        return "budget" if elapsed_s >= budget else ""


class PairsRule:
    """Says after every pair of processes whether to stop, and why; '' means go on.

    A verdict may fall at the looks of `statistics.LOOKS` alone, each of which spends a share of the error rate, so looking
    often does not raise it. With `sampling.processes` there is one look, at the end. `worth`: the least saving that is of
    interest; once it is unlikely, or the second much slower in every round, it stops.
    """

    def __init__(self, sampling: Sampling, *, error_rate: float = ERROR_RATE, worth: float | None = None) -> None:
        self.sampling, self.error_rate, self.worth = sampling, error_rate, worth

    def rounds(self, round_ns: int) -> int:
        """How often the two steps of a pair are run, if both together take so long."""
        if self.sampling.samples is not None:
            return self.sampling.samples
        fitting = PAIR_SHARE * self.sampling.seconds * 1e9 / max(round_ns, 1)
        return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(fitting)))

    def left_s(self, pairs: int, elapsed_s: float) -> float:
        """At most, at the pace so far."""
        asked = self.sampling.processes
        by_pairs = ((asked or MOST_PAIRS) - pairs) * elapsed_s / max(pairs, 1)
        return by_pairs if asked else min(by_pairs, max(0.0, PAIRS_BUDGET * self.sampling.seconds - elapsed_s))

    def after(self, differences: Sequence[float], elapsed_s: float) -> str:
        pairs, asked = len(differences), self.sampling.processes
        if asked is not None:
            return PROCESSES if pairs >= asked else ""
        if pairs in LOOKS and self._settled(differences):
            return DECIDED
        over = elapsed_s >= PAIRS_BUDGET * self.sampling.seconds and pairs >= FEWEST_PAIRS
        return BUDGET if over or pairs >= MOST_PAIRS else ""

    def _settled(self, differences: Sequence[float]) -> bool:
        found = difference_of_pairs(differences, error_rate_at(len(differences), True, self.error_rate))
        if self.worth is None or len(differences) < FEWEST_PAIRS:
            return found.decided(SAME_WITHIN)
        best = difference_of_pairs(differences, 2 * ERROR_RATE)  # as fast as it may be, one side at 5 %
        return found.decided(SAME_WITHIN) or best.center - best.half > math.log1p(-self.worth)

    def much_faster(self, first_ns: Sequence[int], second_ns: Sequence[int]) -> bool:
        """Whether one pair alone decides: every round of the second is so much faster than every one of the first."""
        if self.worth is None or min(len(first_ns), len(second_ns)) < MUCH_SLOWER_ROUNDS:
            return False
        return min(first_ns) > MUCH_FASTER_RATIO * max(second_ns)

    def much_slower(self, first_ns: Sequence[int], second_ns: Sequence[int]) -> bool:
        """Whether all rounds so far make more of them a waste of time."""
        if self.worth is None or len(first_ns) < MUCH_SLOWER_ROUNDS:
            return False
        return all(b > MUCH_SLOWER_RATIO * a for a, b in zip(first_ns, second_ns, strict=True))
