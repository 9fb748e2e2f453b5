"""What an op must move and do, and the arithmetic that its rules share."""

import re

import msgspec

from flopwise.work.op_tensors import ITEM_BYTES, LARGEST, Tensor

AT_MOST, ABOUT = "at most", "about"
_WORTH_TELLING = 0.01  # of the bytes: a bias that may be the weight is no matter


class Traffic(msgspec.Struct, frozen=True):
    """What one op must move and do."""

    n_bytes: int
    flops: float
    dtype: str  # as PyTorch spells it: of what is written; of a product, what it is multiplied in
    bytes_are: str = ""  # AT_MOST, ABOUT, or exact


def moved(read: list[Tensor], written: int, dtype: str | None, more: int = 0) -> Traffic | None:
    """These are read, so many elements of this type are written, and some bytes on top."""
    if dtype is None:
        return None
    n_bytes = sum(tensor.n_bytes for tensor in read) + written * ITEM_BYTES[dtype] + more
    return Traffic(n_bytes, max([written, *(tensor.elements for tensor in read)]), dtype, doubt(read, n_bytes))


def doubt(read: list[Tensor], n_bytes: int) -> str:
    """AT_MOST where two inputs look the same: they may be one tensor (`x * x`), which is read once.

    >>> x, bias = Tensor((4, 8), (8, 1), "float"), Tensor((8,), (1,), "float")
    >>> doubt([x, x], 384), doubt([x, bias], 288)
    ('at most', '')
    """
    twice = sum(tensor.n_bytes for place, tensor in enumerate(read) if tensor in read[:place])
    return AT_MOST if twice > _WORTH_TELLING * n_bytes else ""


def numbers(text: str) -> list[int] | None:
    """`1` or `[0, 1]`; none in '' and '[]'; None for anything else.

    >>> numbers("[0, -1]"), numbers("2"), numbers(""), numbers("[0"), numbers("0.5")
    ([0, -1], [2], [], None, None)
    """
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not re.fullmatch(r"(?:-?[0-9]{1,15}(?:, ?-?[0-9]{1,15})*)?", inner):
        return None
    return [int(number) for number in re.findall(r"-?[0-9]+", inner)]


def sensible(traffic: Traffic) -> bool:
    """No op moves or does more than this; one that seems to has garbled sizes."""
    return 0 < traffic.n_bytes < 32 * LARGEST and 0 < traffic.flops < float(LARGEST) ** 2
