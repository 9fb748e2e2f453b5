"""The sizes of ops' inputs, where a trace was captured with shapes: kept for the few ops whose FLOPs are asked for.

Both profilers write them as the same text, `[[48, 512, 64], [48, 64, 512]]`, one list per input. A trace repeats a few
dozen of these texts a million times, so a text is kept once and an op holds its number.
"""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from flopwise.trace.tables import SIZED_OPS

NO_SHAPE = 0
MAX_SHAPES = 100_000  # distinct; a model has dozens
MAX_SHAPE_BYTES = 1000


@dataclass
class Shapes:
    """Every text of sizes once, in the order of its first use; number 0 is 'not given'."""

    ids: dict[str, int] = field(default_factory=lambda: {"": NO_SHAPE})

    def id(self, sizes: bytes) -> int:
        """The number of a text of sizes; 0 for what is beyond all reason.

        >>> shapes = Shapes()
        >>> [shapes.id(sizes) for sizes in (b"[[2, 3], [3, 4]]", b"[[2], [2]]", b"[[2, 3], [3, 4]]")]
        [1, 2, 1]
        """
        if len(sizes) > MAX_SHAPE_BYTES:
            return NO_SHAPE
        text = sizes.decode("ascii", "replace")
        if text not in self.ids and len(self.ids) >= MAX_SHAPES:
            return NO_SHAPE
        return self.ids.setdefault(text, len(self.ids))


def sized_ops(shape: pl.Series) -> pl.DataFrame:
    """The rows of the ops that have sizes, of a column with a number for each op."""
    numbers = shape.to_numpy()
    rows = np.flatnonzero(numbers != NO_SHAPE)
    return pl.DataFrame({"op": rows.astype(np.uint32), "shape": numbers[rows]}, schema=SIZED_OPS)
