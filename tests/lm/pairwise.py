"""Few cases in which every two values of different levers meet at least once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Mapping[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(case.items(), 2))


def all_pairs(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]
) -> set[tuple[tuple[str, Any], ...]]:
    both = (product(*([(name, value) for value in factors[name]] for name in two)) for two in combinations(factors, 2))
    return {pair for some in both for pair in some if allowed(dict(pair))}


def pairwise_cases(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Greedy: each case begins with a pair that none has yet, and takes for every other lever the value that adds most.

    `allowed` is asked of a case that may still lack some levers.
    """
    left, cases = all_pairs(factors, allowed), []
    while left:
        case = dict(min(left, key=repr))
        for name, values in factors.items():
            if name not in case:
                fits = [value for value in values if allowed({**case, name: value})]
                case[name] = max(fits, key=lambda value: len(left & _new_pairs(factors, case, name, value)))
        case = {name: case[name] for name in factors}
        left -= pairs_of(case)
        cases.append(case)
    return cases


def _new_pairs(factors: Mapping[str, Sequence[Any]], case: Case, name: str, value: Any) -> set[Any]:
    order = list(factors)
    return {tuple(sorted(((other, case[other]), (name, value)), key=lambda one: order.index(one[0]))) for other in case}
