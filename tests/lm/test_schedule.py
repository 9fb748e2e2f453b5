"""The schedule at its corners, and the examples in the room's docstrings."""

import doctest
import importlib
import itertools
import pkgutil

import pytest

from flopwise import lm
from flopwise.lm.schedule import warmup_cosine

SCHEDULE = {"peak": 3e-4, "floor": 3e-5, "warmup_steps": 10, "total_steps": 110}


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.0), (5, 1.5e-4), (10, 3e-4), (60, 1.65e-4), (110, 3e-5), (111, 3e-5), (10**9, 3e-5)]
)
def test_corners(step: int, expected: float) -> None:
    assert warmup_cosine(step, **SCHEDULE) == pytest.approx(expected, abs=1e-12)


def test_rises_then_falls_without_a_jump() -> None:
    rates = [warmup_cosine(step, **SCHEDULE) for step in range(130)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) <= 3e-5 + 1e-12


def test_degenerate_schedules() -> None:
    assert warmup_cosine(0, peak=1.0, floor=0.1, warmup_steps=0, total_steps=5) == 1.0
    assert warmup_cosine(0, peak=1.0, floor=0.1, warmup_steps=0, total_steps=0) == 0.1
    assert warmup_cosine(5, peak=1.0, floor=0.1, warmup_steps=5, total_steps=5) == 0.1


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(lm.__path__)])
def test_docstring_examples(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(f"flopwise.lm.{module}"))
    assert failed == 0
