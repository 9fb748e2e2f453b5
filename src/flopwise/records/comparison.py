"""Is B faster than A? The answer, as it is kept."""

from typing import Annotated

import msgspec

FASTER, SLOWER, NO_DIFFERENCE, INCONCLUSIVE = "faster", "slower", "no difference shown", "inconclusive"


Ratio = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # a file from outside may hold any number


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """B against A: a ratio below 1 means that B takes less time."""

    # Paired: the mean over pairs of processes of what samples next to each other say. Else of the medians. None: no samples.
    ratio: Ratio | None
    low: Ratio | None  # None: no interval can be given
    high: Ratio | None
    verdict: str  # 'faster', 'slower', 'no difference shown', 'inconclusive'
    reason: str  # why, in one line
    n_a: int
    n_b: int
    paired: bool
    drift: float = 0.0  # what the interval was widened by, as a share: how far the level may have moved within the runs
    n_processes: int = 1  # pairs of processes; not paired: of the one that has fewer
    spread: float = 0.0  # standard deviation of the ratio from one pair of processes to another, as a share
    settle: str = ""  # of an inconclusive one: what would settle it
