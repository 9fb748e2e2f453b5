"""Is B faster than A? The answer, as it is kept."""

from typing import Annotated

import msgspec

FASTER, SLOWER, NO_DIFFERENCE, INCONCLUSIVE = "faster", "slower", "no difference shown", "inconclusive"


Ratio = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # a file from outside may hold any number


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """B against A: a ratio below 1 means that B takes less time."""

    ratio: Ratio | None  # of the medians; paired: the median of the pairs' ratios. None: one of the two has no samples
    low: Ratio | None  # None: no interval can be given
    high: Ratio | None
    verdict: str  # 'faster', 'slower', 'no difference shown', 'inconclusive'
    reason: str  # why, in one line
    n_a: int
    n_b: int
    paired: bool
    drift: float  # what the interval was widened by, as a share: how far the level may have moved within the runs
