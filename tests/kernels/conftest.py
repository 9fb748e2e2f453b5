"""Kernels run on a GPU where there is one, else in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch hands out unwritten is full of NaN: an element that a kernel forgets shows."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
            fresh = allocate(*args, **kwargs)
            return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

        return allocated

    for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(holder, name, poisoned(getattr(holder, name)))


@pytest.fixture(scope="session")
def error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """‖found − truth‖ / ‖truth‖, in fp64."""

    def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
        truth = truth.detach().double().cpu()
        return float((found.detach().double().cpu() - truth).norm() / truth.norm().clamp_min(1e-30))

    return relative
