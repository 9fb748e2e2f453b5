"""The sizes of ops' inputs, where a trace was captured with shapes: kept for the few ops whose FLOPs are asked for.

Both profilers write them as the same text, `[[48, 512, 64], [48, 64, 512]]`, one list per input. A trace repeats a few
dozen of these texts a million times, so a text is kept once and an op holds its number.
"""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from flopwise.trace.tables import SIZED_OPS

# Fused attention: those whose inputs are [batch, heads, tokens, width], and those with heads and tokens the other way round.
BY_HEAD = frozenset(
    f"aten::_{name}{way}"
    for way in ("", "_backward")
    for name in (
        "scaled_dot_product_flash_attention",
        "scaled_dot_product_efficient_attention",
        "scaled_dot_product_cudnn_attention",
    )
) | {
    "aten::_cudnn_attention_forward",
    "aten::_cudnn_attention_backward",
    "flopwise::flash_forward",
    "flopwise::flash_backward",
}
BY_TOKEN = frozenset(
    f"aten::_{name}_attention_{way}" for name in ("flash", "efficient") for way in ("forward", "backward")
) | {"flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward"}
SIZED = frozenset(
    {
        *BY_HEAD,
        *BY_TOKEN,
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::exp",  # of a softmax that is written out
    }
)
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
