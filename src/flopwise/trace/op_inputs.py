"""What ops were given: sizes, types, strides and numbers of their inputs, kept for those whose bytes follow from them.

Kineto writes four lists for an op of a trace captured with shapes, one entry per input: `Input Dims`, `Input type`, `Input
Strides` and `Concrete Inputs` (numbers and flags; empty for a tensor). Together they are one text; a trace repeats a few
hundred of these a million times, so each is kept once and an op holds its number. How its bytes follow, `work.op_traffic`
has a rule for.
"""

import re

import numpy as np
import polars as pl

from flopwise.trace.op_shapes import Shapes
from flopwise.trace.tables import OP_INPUTS
from flopwise.work.op_traffic import traffic_rule
from flopwise.work.recorded import BETWEEN
from flopwise.work.sized import SIZED, writes_cache

NO_INPUTS = 0
MAX_INPUTS = 100_000  # distinct; a model has hundreds
_LINE_END = re.compile(r"(,?)\s*\n\s*")  # outside of every string: JSON has none in one
ALL_INPUTS_BYTES = 64 << 20
MAX_INPUTS_BYTES = 32_000  # an optimizer gives six lists of up to thirty tensors


class _Kept(dict[str, bool]):
    """Whether the inputs of an op are kept, asked once per name."""

    def __missing__(self, op: str) -> bool:
        self[op] = kept = op in SIZED or traffic_rule(op) is not None or writes_cache(op)
        return kept


class Inputs(dict[bytes, int]):
    """Every text of inputs once, in the order of its first use; number 0 is 'not given', or beyond all reason.

    >>> inputs = Inputs()
    >>> [inputs[text] for text in (b"[[2, 3]]", b"[[2], [2]]", b"[[2, 3]]")]
    [1, 2, 1]
    """

    def __init__(self) -> None:
        super().__init__({b"": NO_INPUTS})
        self.kept = _Kept()
        self._left = ALL_INPUTS_BYTES

    def __missing__(self, text: bytes) -> int:
        if len(text) > min(MAX_INPUTS_BYTES, self._left) or len(self) >= MAX_INPUTS:
            return NO_INPUTS
        self._left -= len(text)
        self[text] = number = len(self)
        return number

    def texts(self) -> tuple[str, ...]:
        """By their numbers; what a file that was written again has on many lines, on one.

        >>> inputs = Inputs()
        >>> inputs[b'[\\n  [\\n    2,\\n    3\\n  ]\\n]']
        1
        >>> inputs.texts()[1]
        '[[2, 3]]'
        """
        texts = (text.decode("utf-8", "replace") for text in self)
        return tuple(
            _LINE_END.sub(lambda end: ", " if end[1] else "", text) if "\n" in text else text for text in texts
        )


def op_inputs(numbers: pl.Series) -> pl.DataFrame:
    """The rows of the ops whose inputs are kept, of a column with a number for each op."""
    found = numbers.to_numpy()
    rows = np.flatnonzero(found != NO_INPUTS)
    return pl.DataFrame({"op": rows.astype(np.uint32), "inputs": found[rows]}, schema=OP_INPUTS)


def sizes_of_inputs(
    ops: pl.DataFrame, names: tuple[str, ...], inputs: tuple[str, ...]
) -> tuple[pl.Series, tuple[str, ...]]:
    """The number of the sizes alone, for the ops in SIZED, and the texts these numbers stand for."""
    shapes = Shapes()
    of_inputs = np.array([shapes.id(text.partition(BETWEEN)[0].encode()) for text in inputs], dtype=np.uint32)
    sized = np.array([name in SIZED for name in names])
    return pl.Series(np.where(sized[ops["name"].to_numpy()], of_inputs[ops["inputs"].to_numpy()], 0)), tuple(shapes.ids)
