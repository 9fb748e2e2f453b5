"""A worker that all tests share, and trials of a user's own steps."""

import os
from pathlib import Path

import pytest

from flopwise.capture.isolate import Worker
from flopwise.spec.workload import Sampling, Trial, workload

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def worker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)  # where the worker finds `steps`
        with Worker() as shared:
            yield shared


@pytest.fixture
def own_step():
    """A trial of py:steps:NAME."""

    def make(name: str, **sampling) -> Trial:
        sampling = {"warmup": 0, "samples": 3, "timeout_s": 60.0} | sampling
        return Trial(workload=workload(f"py:steps:{name}"), sampling=Sampling(**sampling), device="cpu")

    return make
