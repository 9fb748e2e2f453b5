"""What holds for every test: this machine's own calibration has no part in it, nor has its speed.

Two processes run tests at a time: each has one thread for torch, and forks its workers from one that has torch loaded.
"""

import io
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from flopwise.cli.main import main
from forked_workers import workers_are_forked
from quick import ALL

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
SOURCE = str(Path(__file__).parents[1] / "src")  # what a program that a test starts imports, as the test itself does
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("all"), derandomize=True, max_examples=10)
settings.load_profile("all" if ALL else "quick")


def pytest_collection_modifyitems(items):
    """In `make test` every property is tried with a tenth of the examples that its own settings ask for, from ten on."""
    if ALL:
        return
    for test in {getattr(item, "obj", None) for item in items}:
        if asked := getattr(test, "_hypothesis_internal_use_settings", None):
            few = min(asked.max_examples, max(10, asked.max_examples // 10))
            test._hypothesis_internal_use_settings = settings(asked, max_examples=few, derandomize=True)


@pytest.fixture(autouse=True, scope="session")
def _no_ceilings_of_this_machine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOPWISE_CEILINGS", str(tmp_path_factory.mktemp("ceilings")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _workers_are_forked():
    with workers_are_forked():
        yield


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def cli():
    """`flopwise WORDS` in this process, in the folder `cwd` and with these environment variables."""

    def run(*words: object, cwd: Path | None = None, **environment: str) -> Ended:
        printed, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        before = signal.getsignal(signal.SIGTERM)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(said):
            for name in ("FLOPWISE_RUNS", "FLOPWISE_DEBUG"):
                patch.delenv(name, raising=False)
            for name, value in ({"COLUMNS": "200"} | environment).items():
                patch.setenv(name, value)
            patch.chdir(cwd or Path.cwd())
            try:
                with pytest.raises(SystemExit) as ended:
                    main([str(word) for word in words])
            finally:
                signal.signal(signal.SIGTERM, before)
        out, err = (stream.buffer.getvalue().decode() for stream in (printed, said))  # type: ignore[attr-defined]
        return Ended(int(ended.value.code or 0), out, err)

    return run
