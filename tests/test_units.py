"""Text and numbers."""

import pytest

from flopwise import units
from flopwise.errors import FlopwiseError


@pytest.mark.parametrize(
    ("text", "share"), [("3%", 0.03), ("3", 0.03), ("1", 0.01), ("0.5", 0.5), ("0.5 %", 0.005), ("150%", 1.5)]
)
def test_percentages_as_people_write_them(text, share):
    assert units.parse_percent(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "x", "-3%", "1e9", "5000", "nan"])
def test_what_is_no_percentage(text):
    with pytest.raises(FlopwiseError, match="not a percentage"):
        units.parse_percent(text)


def test_one_thing_is_not_several():
    """A past bug: '1 launches'."""
    assert (units.several(1, "launch"), units.several(0.6, "wait")) == ("1 launch", "1 wait")
    assert (units.several(0, "launch"), units.several(12345, "pass")) == ("0 launches", "12,345 passes")
