"""The fixture of `pytest_plugin`: measures a step, and stores it as a baseline or compares it with one."""

import hashlib
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flopwise import units
from flopwise.analysis.measured import MeasuredRun
from flopwise.api import bench as bench_verb
from flopwise.api.compare import compare
from flopwise.errors import FlopwiseError, one_line
from flopwise.integrations.pytest_plugin import SUMMARY, FlopwiseWarning
from flopwise.records.comparison import INCONCLUSIVE, SLOWER, Comparison
from flopwise.records.run import Point
from flopwise.spec.recipe import Recipe

_UPDATE = "pytest --flopwise-update"


class StepBench:
    """The fixture of one test. `compared` holds the comparisons that were made, in order."""

    def __init__(self, config: pytest.Config, test: str, folder: Path) -> None:
        """Use the fixture `flopwise`."""
        given = config.getoption("--flopwise-baseline") or config.getini("flopwise_baseline")
        self._baselines = config.rootpath / str(given)
        self._fail_above, self._update = map(config.getoption, ("--flopwise-fail-above", "--flopwise-update"))
        self._summary, self._test, self._folder, self._calls = config.stash[SUMMARY], test, folder, 0
        self.compared: list[Comparison] = []

    def bench(self, target: Any, **options: Any) -> MeasuredRun:
        """As `flopwise.bench`, with its options; fails the test if the step is slower than its baseline by too much."""
        try:
            return self._bench(target, options)
        except FlopwiseError as error:  # a line and its hint, not a traceback through flopwise
            raise pytest.fail.Exception(_message(error), pytrace=False) from None

    def _bench(self, target: Any, options: dict[str, Any]) -> MeasuredRun:
        self._calls += 1
        run = bench_verb.bench(target, runs=self._folder / "flopwise-runs", command=f"pytest {self._test}", **options)
        if bench_verb.outcome(run):  # raises why nothing was measured; else it was stopped by Ctrl-C
            raise KeyboardInterrupt
        stored = self._baselines / _folder_name(self._test, self._calls)
        if self._update:
            _store(run, stored)
            self._report(f"{self._test}: stored as baseline")
        elif not stored.is_dir():
            self._warn(f"it has no baseline: {_UPDATE} stores one", 4)
        else:
            self._compare(run, stored)
        return run

    def _compare(self, run: MeasuredRun, stored: Path) -> None:
        before = _load(stored)
        if sorted(map(_subject, before.points)) != sorted(map(_subject, run.points)):
            what = f"{_labels(before.points)}; this is {_labels(run.points)}"
            line = f"the baseline is of another workload ({what}): {_UPDATE} stores a new one"
            pytest.fail(one_line(line), pytrace=False)
        fail_above = units.parse_percent(self._fail_above)
        found = compare(before, run, threshold=fail_above)
        if found.across:
            self._warn(f"not compared: {found.across} (A: its baseline); {_UPDATE} stores a new one", 5)
            return
        for a, b, comparison in found.pairs:
            self.compared.append(comparison)
            line = _verdict(a, b, comparison)
            if comparison.verdict == INCONCLUSIVE:
                self._warn(f"{line}: {comparison.reason}", 5)
                continue
            self._report(f"{self._test}: {line}")
            if comparison.verdict == SLOWER and (comparison.ratio or 0.0) > 1 + fail_above:
                pytest.fail(one_line(f"{line}; allowed: {units.percent(fail_above)} more"), pytrace=False)

    def _report(self, line: str) -> None:
        self._summary.append(one_line(line))

    def _warn(self, line: str, frames: int) -> None:
        """Report it, and warn at the test's line, so many frames up."""
        self._report(f"{self._test}: {line}")
        warnings.warn(FlopwiseWarning(line), stacklevel=frames)


def check_percentage(option: str, given: str) -> None:
    """Raise wrong usage where an option's value is no percentage."""
    try:
        units.parse_percent(given)
    except FlopwiseError as error:
        raise pytest.UsageError(f"{option}: {_message(error)}") from None


def _message(error: FlopwiseError) -> str:
    return f"{error.message}\nhint: {error.hint}" if error.hint else error.message


def _verdict(a: Point, b: Point, c: Comparison) -> str:
    ratio = f"{c.ratio:.3f} times its baseline" if c.ratio is not None else "without a ratio"
    interval = f" ({c.low:.3f} to {c.high:.3f})" if c.low is not None and c.high is not None else ""
    label, was = b.trial.workload.label(), a.trial.workload.label()
    return f"{label}: {c.verdict}, {ratio}{interval}" + (f", which was {was}" if was != label else "")


def _folder_name(test: str, call: int) -> str:
    """A readable name that no other test has.

    >>> _folder_name("tests/test_step.py::test_step[bf16]", 1)
    'test_step-bf16-1-2cb5f6c0'
    """
    name = re.sub(r"[^A-Za-z0-9_]+", "-", test.rpartition("::")[2]).strip("-")[:80]
    return f"{name}-{call}-{hashlib.sha256(f'{test}#{call}'.encode()).hexdigest()[:8]}"


def _store(run: MeasuredRun, folder: Path) -> None:
    """The run's header and rows, without its logs."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for name in ("run.json", "points.jsonl"):
            shutil.copyfile(run.path / name, folder / name)
    except OSError as error:
        text = f"cannot store the baseline in {folder}: {error.strerror}"
        raise FlopwiseError(text, "name a folder with --flopwise-baseline") from None


def _load(stored: Path) -> MeasuredRun:
    """A baseline whose rows can all be read."""
    try:
        before = MeasuredRun.load(stored)
        problem = next(iter(before.warnings), "" if before.points else "it has no rows")
    except FlopwiseError as error:
        problem = error.message
    if problem:
        raise FlopwiseError(f"the baseline {stored} cannot be read: {problem}", f"{_UPDATE} stores a new one")
    return before


def _subject(point: Point) -> bytes:
    """What is measured, whatever its levers: those may change, and the comparison shows what that was worth."""
    plain = msgspec.structs.replace(point.trial.workload, recipe=Recipe(), target="", changes={})
    return msgspec.json.encode(plain, order="deterministic")


def _labels(points: tuple[Point, ...]) -> str:
    return ", ".join(point.trial.workload.label() for point in points)
