"""Pages that quote a constant quote its value."""

from pathlib import Path

import pytest

from flopwise.advice import constants
from flopwise.capture.stopping import MUCH_SLOWER_RATIO, MUCH_SLOWER_ROUNDS

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "explanation" / "tuning.md").read_text().split())


def percent(share):
    return f"{100 * share:g} %"


@pytest.mark.parametrize(
    "text",
    [
        f"less than {percent(constants.WORTH_TRYING)} of the step ({percent(constants.WORTH_TRYING_ALONE)} where two steps",
        *(f"| {measure} | {constants.ALLOWED[measure]:g} |" for measure in constants.ALLOWED),
        f"| loss | {constants.ALLOWED_LOSS:g} |",
        f"{constants.ALLOWED_LATER:g} times that in later steps",
        f"{percent(constants.SMALLER_SHARE)} less memory",
        f"or saves {percent(constants.SMALLER_SHARE)}",
        f"a saving of {percent(constants.WORTH_KEEPING)} is unlikely",
        f"in at most {percent(constants.TUNE_ERROR_RATE / 2)} of runs",
        f"more than {('zero', 'one', 'twice')[int(MUCH_SLOWER_RATIO)]} as long in each of the first",
        f"first {('zero', 'one', 'two')[MUCH_SLOWER_ROUNDS]} rounds is given up",
    ],
)
def test_the_page_quotes_the_constants(text):
    assert text in PAGE
