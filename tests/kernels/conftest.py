"""Kernels run on a GPU where there is one, else in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
