"""How much is tried: `make test` takes a tenth of every fuzz, `make test-all` (FLOPWISE_TESTS=all) the whole of it.

Both try the same examples each time, so that red means a change of the code; `make fuzz` (FLOPWISE_TESTS=fuzz) draws new ones.
"""

import os

FUZZ = os.environ.get("FLOPWISE_TESTS") == "fuzz"
ALL = FUZZ or os.environ.get("FLOPWISE_TESTS") == "all"


def tenth(count: int) -> int:
    """How many of `count` cases to try: a tenth, at least one; all of them in `make test-all`."""
    return count if ALL else max(1, count // 10)
