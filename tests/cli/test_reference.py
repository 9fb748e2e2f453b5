"""The reference pages are what the code says."""

from pathlib import Path

import pytest

from flopwise.cli.main import VERBS
from flopwise.cli.reference import VALUES, cli_reference, levers_reference
from flopwise.spec.recipe import CHOICES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize(
    ("name", "made", "words"), [("cli", cli_reference, ""), ("levers", levers_reference, " levers")]
)
def test_a_page_is_what_the_code_makes(name, made, words):
    page = (REFERENCE / f"{name}.md").read_text(encoding="utf-8")
    assert page == made(), f"python -m flopwise.cli.reference{words} > docs/reference/{name}.md"


def test_every_verb_and_every_value_is_told():
    page = cli_reference()
    assert all(f"## flopwise {verb}\n" in page for verb in VERBS)
    assert {lever: tuple(told) for lever, told in VALUES.items()} == CHOICES
