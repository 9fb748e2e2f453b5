"""What holds for every test: this machine's own calibration has no part in it, nor has its speed.

Two processes run tests at a time: each has one thread for torch, and forks its workers from one that has torch loaded.
"""

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from forked_workers import workers_are_forked
from in_process import in_process
from quick import ALL, FUZZ

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
SOURCE = str(Path(__file__).parents[1] / "src")  # what a program that a test starts imports, as the test itself does
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("all", deadline=None, derandomize=not FUZZ, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("all"), max_examples=10)
settings.load_profile("all" if ALL else "quick")


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items):
    """In `make test` every property is tried with a tenth of the examples that its own settings ask for, from ten on, and what is
    marked `one_in(n)` with every n-th of its cases.
    """
    if ALL:
        return
    seen = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            if seen[item.path, item.originalname] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[item.path, item.originalname] += 1
    for test in {getattr(item, "obj", None) for item in items}:
        if asked := getattr(test, "_hypothesis_internal_use_settings", None):
            few = min(asked.max_examples, max(10, asked.max_examples // 10))
            test._hypothesis_internal_use_settings = settings(asked, max_examples=few, derandomize=True)


def pytest_collection_finish():
    gc.freeze()  # tests and libraries stay: no collection has to walk them, in no test


@pytest.fixture(autouse=True, scope="session")
def _no_ceilings_of_this_machine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOPWISE_CEILINGS", str(tmp_path_factory.mktemp("ceilings")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _workers_are_forked():
    with workers_are_forked():
        yield


@pytest.fixture(scope="session")
def cli():
    """`flopwise WORDS` in this process."""
    return in_process
