"""A step's speed as a test: the fixture `flopwise` measures a workload and compares it with a stored baseline.

    def test_step(flopwise):
        flopwise.bench("py:train:step", samples=20)

`pytest --flopwise-update` stores the baseline; later runs fail where the step has become slower by more than
`--flopwise-fail-above`. Nothing of flopwise is imported before a test asks for the fixture, or that option is given.
"""

import hashlib
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flopwise.errors import FlopwiseError
    from flopwise.records.comparison import Comparison
    from flopwise.records.run import Point
    from flopwise.spec.workload import Workload
    from flopwise.store import StoredRun

_DEFAULT = ".flopwise/baseline"
_FAIL_ABOVE = "5%"
_UPDATE = "pytest --flopwise-update"
_SAID = pytest.StashKey[list[str]]()


class FlopwiseWarning(UserWarning):
    """A measurement that could not be judged."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options, and the setting that says where baselines lie."""
    group = parser.getgroup("flopwise", "flopwise: the speed of a step")
    group.addoption(
        "--flopwise-fail-above", default=_FAIL_ABOVE, metavar="PERCENT",
        help=f"fail a test whose step is slower than its baseline by more (default: {_FAIL_ABOVE})",
    )  # fmt: skip
    group.addoption("--flopwise-update", action="store_true", help="store what is measured as the new baseline")
    group.addoption("--flopwise-baseline", metavar="DIR", help="where the baselines are stored")
    parser.addini("flopwise_baseline", "where flopwise's baselines are stored", default=_DEFAULT)


def pytest_configure(config: pytest.Config) -> None:
    """What is said at the end begins empty; a percentage that is none ends the run before it begins."""
    config.stash[_SAID] = []
    given = config.getoption("--flopwise-fail-above")
    if given != _FAIL_ABOVE:
        from flopwise.errors import FlopwiseError
        from flopwise.units import parse_percent

        try:
            parse_percent(given)
        except FlopwiseError as error:
            raise pytest.UsageError(f"--flopwise-fail-above: {_told(error)}") from None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for each measurement."""
    if lines := config.stash.get(_SAID, []):
        terminalreporter.section("flopwise")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def flopwise(request: pytest.FixtureRequest, tmp_path: Path) -> "Measuring":
    """Measures steps and compares each with its stored baseline."""
    return Measuring(request.config, request.node.nodeid, tmp_path)


class Measuring:
    """The fixture of one test. `compared` holds the comparisons that were made, in order."""

    def __init__(self, config: pytest.Config, test: str, place: Path) -> None:
        """Use the fixture `flopwise`."""
        given = config.getoption("--flopwise-baseline") or config.getini("flopwise_baseline")
        self._baselines = config.rootpath / str(given)
        self._fail_above, self._update = (
            config.getoption("--flopwise-fail-above"),
            config.getoption("--flopwise-update"),
        )
        self._config, self._test, self._place, self._calls = config, test, place, 0
        self.compared: list[Comparison] = []

    def bench(self, target: Any, **options: Any) -> "StoredRun":
        """As `flopwise.bench`, with its options; fails the test if the step is slower than its baseline by too much."""
        from flopwise.errors import FlopwiseError

        try:
            return self._bench(target, options)
        except FlopwiseError as error:  # a line and its hint, not a traceback through flopwise
            raise pytest.fail.Exception(_told(error), pytrace=False) from None

    def _bench(self, target: Any, options: dict[str, Any]) -> "StoredRun":
        from flopwise.api.bench import bench, outcome

        self._calls += 1
        run = bench(target, runs=self._place / "flopwise-runs", command=f"pytest {self._test}", **options)
        if outcome(run):  # raises what stood in the way of measuring; else it was stopped by Ctrl-C
            raise KeyboardInterrupt
        stored = self._baselines / _folder(self._test, self._calls)
        if self._update:
            _store(run, stored)
            self._say(f"{self._test}: stored as baseline")
        elif not stored.is_dir():
            self._warn(f"it has no baseline: {_UPDATE} stores one", 4)
        else:
            self._judge(run, stored)
        return run

    def _judge(self, run: "StoredRun", stored: Path) -> None:
        from flopwise import units
        from flopwise.api.compare import compare
        from flopwise.errors import one_line
        from flopwise.records.comparison import INCONCLUSIVE, SLOWER

        before = _load(stored)
        if sorted(map(_subject, before.points)) != sorted(map(_subject, run.points)):
            what = f"{_labels(before.points)}; this is {_labels(run.points)}"
            line = f"the baseline is of another workload ({what}): {_UPDATE} stores a new one"
            pytest.fail(one_line(line), pytrace=False)
        there, here = _machine(before.points), _machine(run.points)
        if there != here:
            self._warn(f"its baseline was measured on another machine ({there}; this is {here}): not compared", 5)
            return
        fail_above = units.parse_percent(self._fail_above)
        for a, b, c in compare(before, run, threshold=fail_above).pairs:
            self.compared.append(c)
            ratio = f"{c.ratio:.3f} times its baseline" if c.ratio is not None else "without a ratio"
            interval = f" ({c.low:.3f} to {c.high:.3f})" if c.low is not None and c.high is not None else ""
            label, was = b.trial.workload.label(), a.trial.workload.label()
            said = f"{label}: {c.verdict}, {ratio}{interval}" + (f", which was {was}" if was != label else "")
            if c.verdict == INCONCLUSIVE:
                self._warn(f"{said}: {c.reason}", 5)
                continue
            self._say(f"{self._test}: {said}")
            if c.verdict == SLOWER and (c.ratio or 0.0) > 1 + fail_above:
                pytest.fail(one_line(f"{said}; allowed: {units.percent(fail_above)} more"), pytrace=False)

    def _say(self, line: str) -> None:
        from flopwise.errors import one_line

        self._config.stash[_SAID].append(one_line(line))

    def _warn(self, line: str, frames: int) -> None:
        """Say it, and warn at the test's line, so many frames up."""
        self._say(f"{self._test}: {line}")
        warnings.warn(FlopwiseWarning(line), stacklevel=frames)


def _told(error: "FlopwiseError") -> str:
    return f"{error.message}\nhint: {error.hint}" if error.hint else error.message


def _folder(test: str, call: int) -> str:
    """A folder's name that tells the test and is no other's.

    >>> _folder("tests/test_step.py::test_step[bf16]", 1)
    'test_step-bf16-1-2cb5f6c0'
    """
    name = re.sub(r"[^A-Za-z0-9_]+", "-", test.rpartition("::")[2]).strip("-")[:80]
    return f"{name}-{call}-{hashlib.sha256(f'{test}#{call}'.encode()).hexdigest()[:8]}"


def _store(run: "StoredRun", place: Path) -> None:
    """The run's header and rows, without its logs."""
    from flopwise.errors import FlopwiseError

    try:
        if place.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True)
        for name in ("run.json", "points.jsonl"):
            shutil.copyfile(run.path / name, place / name)
    except OSError as error:
        raise FlopwiseError(
            f"cannot store the baseline in {place}: {error.strerror}", "name a folder with --flopwise-baseline"
        ) from None


def _load(stored: Path) -> "StoredRun":
    """A baseline whose rows can all be read."""
    from flopwise.errors import FlopwiseError
    from flopwise.store import StoredRun

    try:
        before = StoredRun.load(stored)
        why = next(iter(before.warnings), "" if before.points else "it has no rows")
    except FlopwiseError as error:
        why = error.message
    if why:
        raise FlopwiseError(f"the baseline {stored} cannot be read: {why}", f"{_UPDATE} stores a new one")
    return before


def _subject(point: "Point") -> bytes:
    """What is measured, whatever its levers: those may change, and the test says what that was worth."""
    import msgspec

    from flopwise.spec.recipe import Recipe

    plain: Workload = msgspec.structs.replace(point.trial.workload, recipe=Recipe(), target="", changes={})
    return msgspec.json.encode(plain, order="deterministic")


def _labels(points: "tuple[Point, ...]") -> str:
    return ", ".join(point.trial.workload.label() for point in points)


def _machine(points: "tuple[Point, ...]") -> str:
    """What a time depends on most."""
    there = next((point.environment for point in points if point.environment), None)
    if there is None:
        return "an unknown machine"
    return there.gpu.name if there.gpu else f"{there.cpu}, {there.cpu_cores} cores"
