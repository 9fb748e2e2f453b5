"""The sizes of ops' inputs, where a trace was captured with shapes: kept for the few ops whose FLOPs are asked for.

Both profilers write them as the same text, `[[48, 512, 64], [48, 64, 512]]`, one list per input. A trace repeats a few
dozen of these texts a million times, so a text is kept once and an op holds its number.
"""

from dataclasses import dataclass, field

SIZED = frozenset(
    {
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
MAX_SHAPE_CHARS = 1000


@dataclass
class Shapes:
    """Every text of sizes once, in the order of its first use; number 0 is 'not given'."""

    ids: dict[str, int] = field(default_factory=lambda: {"": NO_SHAPE})

    def id(self, name: str, sizes: bytes) -> int:
        """The number of an op's sizes; 0 for ops that are not asked about, and for sizes beyond all reason.

        >>> shapes = Shapes()
        >>> shapes.id("aten::mm", b"[[2, 3], [3, 4]]"), shapes.id("aten::add", b"[[2], [2]]")
        (1, 0)
        """
        if name not in SIZED or len(sizes) > MAX_SHAPE_CHARS:
            return NO_SHAPE
        text = sizes.decode("ascii", "replace")
        if text not in self.ids and len(self.ids) >= MAX_SHAPES:
            return NO_SHAPE
        return self.ids.setdefault(text, len(self.ids))
