"""Products of attention, q kᵀ and weights · v, whether written as matmul, bmm or einsum: their operands in one layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flopwise.patch.deferred import Call


@dataclass(frozen=True)
class Layout:
    """The operands with leading dimensions first, and how the result lies in the product as it was written."""

    tensors: tuple[Tensor, ...]
    arranged: Callable[[Tensor], Tensor] = lambda made: made


def start_layout(call: Call) -> Layout | None:
    """q [lead, Tq, D] and k [lead, Tk, D] of a product that may be scores; None for any other call."""
    if call.name == "matmul":
        q, k = call.get(0, "input"), call.get(1, "other", call.kwargs.get("mat2"))
        return Layout((q, k.transpose(-2, -1))) if _is_batch(q) and _is_batch(k) else None
    parts = _einsum(call)
    return _start_einsum(*parts) if parts is not None else None


def _start_einsum(operands: list[Any], letters: list[list[str]]) -> Layout | None:
    of_q, of_k, out = letters
    if not all(isinstance(one, Tensor) for one in operands) or len(out) < 3:
        return None
    *lead, rows, columns = out
    summed = [one for one in of_q if one in of_k and one not in out]
    fits = rows not in of_k and columns not in of_q and {*of_q, *of_k} == {*out, *summed}
    if not fits or len(summed) != 1:
        return None
    return Layout(
        (_lying(operands[0], of_q, [*lead, rows, *summed]), _lying(operands[1], of_k, [*lead, columns, *summed]))
    )


def finish_layout(call: Call, weights: Any, lead: tuple[int, ...]) -> Layout | None:
    """v [lead, Tk, D] of a product with attention's weights; None for any other call."""
    if call.name == "matmul":
        v = call.get(1, "other", call.kwargs.get("mat2"))
        fits = call.get(0, "input") is weights and _is_batch(v) and v.dim() <= len(lead) + 2
        return Layout((v,)) if fits else None
    parts = _einsum(call)
    return _finish_einsum(*parts, weights, len(lead) + 2) if parts is not None else None


def _finish_einsum(operands: list[Any], letters: list[list[str]], weights: Any, dims: int) -> Layout | None:
    *of, out = letters
    if operands[0] is not weights:
        operands, of = operands[::-1], of[::-1]
    (_, v), (of_weights, of_v) = operands, of
    if not isinstance(v, Tensor) or len(of_weights) != dims:
        return None
    *leading, rows, summed = of_weights
    own = [one for one in of_v if one not in of_weights]
    fits = len(own) == 1 and summed in of_v and rows not in of_v and {*out} == {*leading, rows, *own}
    if not fits:
        return None
    made = [*leading, rows, *own]
    return Layout((_lying(v, of_v, [*leading, summed, *own]),), lambda y: y.permute([made.index(one) for one in out]))


def _is_batch(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 3 and x.is_floating_point()


def _einsum(call: Call) -> tuple[list[Any], list[list[str]]] | None:
    """The two operands of an einsum, and the letters of each and of the result."""
    if call.name != "einsum" or not isinstance(call.args[0], str):
        return None
    given = call.args[1:]
    operands = list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else list(given)
    inputs, arrow, out = call.args[0].replace(" ", "").partition("->")
    letters = [list(one) for one in (*inputs.split(","), out)]
    plain = arrow and len(operands) == 2 and len(letters) == 3 and "." not in call.args[0]
    return (operands, letters) if plain and all(len(set(one)) == len(one) for one in letters) else None


def _lying(x: Tensor, letters: list[str], wanted: list[str]) -> Tensor:
    """x with its dimensions in the wanted order, 1 for those that it has not."""
    x = x.permute([letters.index(one) for one in wanted if one in letters])
    for place, one in enumerate(wanted):
        if one not in letters:
            x = x.unsqueeze(place)
    return x
