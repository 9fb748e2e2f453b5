"""A step's speed as a test: the fixture `flopwise` measures a workload and compares it with a stored baseline.

    def test_step(flopwise):
        flopwise.bench("py:train:step", samples=20)

`pytest --flopwise-update` stores the baseline; later runs fail where the step has become slower by more than
`--flopwise-fail-above`. The rest of flopwise is imported when a test asks for the fixture, or that option is given.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flopwise.integrations.pytest_baseline import StepBench

FAIL_ABOVE = "5%"
SUMMARY = pytest.StashKey[list[str]]()  # the lines printed at the end


class FlopwiseWarning(UserWarning):
    """A measurement that was not compared."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options, and the setting for the baselines' folder."""
    group = parser.getgroup("flopwise", "flopwise: the speed of a step")
    fail_above = f"fail a test whose step is slower than its baseline by more (default: {FAIL_ABOVE})"
    group.addoption("--flopwise-fail-above", default=FAIL_ABOVE, metavar="PERCENT", help=fail_above)
    group.addoption("--flopwise-update", action="store_true", help="store what is measured as the new baseline")
    group.addoption("--flopwise-baseline", metavar="DIR", help="where the baselines are stored")
    parser.addini("flopwise_baseline", "where flopwise's baselines are stored", default=".flopwise/baseline")


def pytest_configure(config: pytest.Config) -> None:
    """Start with an empty summary; a wrong percentage ends the run before it begins."""
    config.stash[SUMMARY] = []
    given = config.getoption("--flopwise-fail-above")
    if given != FAIL_ABOVE:
        from flopwise.integrations.pytest_baseline import check_percentage

        check_percentage("--flopwise-fail-above", given)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for each measurement."""
    if lines := config.stash.get(SUMMARY, []):
        terminalreporter.section("flopwise")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def flopwise(request: pytest.FixtureRequest, tmp_path: Path) -> "StepBench":
    """Measures steps and compares each with its stored baseline."""
    from flopwise.integrations.pytest_baseline import StepBench

    return StepBench(request.config, request.node.nodeid, tmp_path)
