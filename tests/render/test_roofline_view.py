"""The roofline of a trace as people and programs read it."""

import msgspec
import pytest

from flopwise.analysis.roofline import Roofline, RooflinePoint, Unplaced
from flopwise.predict.datasheet import from_datasheet
from flopwise.render.roofline_view import drawn, roofline_view
from flopwise.render.table import shown
from flopwise.render.views import html_of
from flopwise.spec.gpu import gpu
from flopwise.work.traffic import ABOUT, AT_MOST

POINT = RooflinePoint(
    op="aten::mul", kind="elementwise", phase="forward", dtype="fp32", shapes="[[1024, 1024]]", count=2, ns=8e3,
    flops=1 << 20, n_bytes=2 << 22, roof_flops=6e11, how="measured", kernel="vectorized_elementwise_kernel",
)  # fmt: skip
REST = Unplaced(op="aten::_fused_adamw_", kernel="multi_tensor_apply", kind="optimizer", why="so many", count=7, ns=2e3)
FOUND = Roofline(
    title="a trace", how="measured", ceilings=from_datasheet(gpu("h200")), points=(POINT,), unplaced=(REST, REST),
    cache_bytes=60 << 20,
)  # fmt: skip


def test_the_points_say_what_they_cover_and_the_rest_is_listed():
    (placed, rest), content = roofline_view(FOUND)
    assert "points cover 66.7 % of the GPU time, durations added up" in placed.notes
    (row,) = rest.rows
    assert (row["op"], row["count"], row["share"]) == ("aten::_fused_adamw_", 14, pytest.approx(1 / 3))
    assert content["covered_share"] == pytest.approx(2 / 3)
    assert [one.ns for one in content["unplaced"]] == [2e3, 2e3]
    assert content["points"][0]["bytes_per_s"] == pytest.approx(2 * (2 << 22) / 8e-6)
    assert drawn(FOUND).to_dict()["title"]["subtitle"].startswith("points cover 66.7 %")


@pytest.mark.parametrize(
    ("n_bytes", "said"),
    [
        (2 << 22, "no larger than the L2 cache"),
        (1 << 30, "the roof is set too low, or bytes are counted that do not move"),
    ],
)
def test_what_lies_above_its_roof_is_explained(n_bytes, said):
    above = msgspec.structs.replace(POINT, roof_flops=1e9, n_bytes=n_bytes)
    (placed, *_), _ = roofline_view(msgspec.structs.replace(FOUND, points=(above,)))
    (note,) = [note for note in placed.notes if "above their roof" in note]
    assert note.startswith("1 above")
    assert said in note


def test_bytes_that_are_not_exact_are_marked():
    assert "bytes are" not in shown(roofline_view(FOUND)[0][0]).headings
    points = tuple(msgspec.structs.replace(POINT, bytes_are=mark, kernels=2) for mark in (AT_MOST, ABOUT))
    marked = msgspec.structs.replace(FOUND, points=points)
    (placed, *_), _ = roofline_view(marked)
    assert "bytes are" in shown(placed).headings
    assert [sum(note.startswith(f"bytes are {mark}") for note in placed.notes) for mark in (AT_MOST, ABOUT)] == [1, 1]
    assert any("2 launch several kernels" in note for note in placed.notes)
    assert [row["moves"][0] for row in dots(marked)] == ["≤", "≈"]


def dots(found):
    return next(
        layer["data"]["values"] for layer in drawn(found).to_dict()["layer"] if layer["mark"]["type"] == "circle"
    )


def test_the_longest_are_drawn_however_short_each_is():
    """A past bug: of 1500 kinds none was a thousandth of the time, and an empty chart said that it covered all."""
    many = tuple(msgspec.structs.replace(POINT, shapes=f"[[{i}]]") for i in range(1500))
    found = msgspec.structs.replace(FOUND, points=many, unplaced=())
    assert len(dots(found)) == 200
    assert drawn(found).to_dict()["title"]["subtitle"].endswith("drawn: the 200 longest of 1500, 13.3 % of their time")


def test_a_spreadsheet_gets_every_kind_and_the_same_columns():
    many = msgspec.structs.replace(FOUND, points=tuple(msgspec.structs.replace(POINT, count=i + 1) for i in range(80)))
    keys = []
    for found in (many, FOUND, msgspec.structs.replace(FOUND, how="predicted", unplaced=())):
        table = roofline_view(found)[0][0]
        keys.append([column.key for column in table.columns])
        assert len(table.rows) == len(found.points)
    assert keys[0] == keys[1] == keys[2]
    assert {"n_bytes", "flops", "bytes_are"} <= set(keys[0])
    assert len(shown(roofline_view(many)[0][0]).cells) == 25


def test_without_a_point_the_rest_is_listed():
    (rest,), content = roofline_view(msgspec.structs.replace(FOUND, points=()))
    assert (rest.key, len(rest.rows), content["covered_share"]) == ("unplaced", 1, 0)
    assert any("no operation has a point" in note for note in rest.notes)


def test_a_notebook_shows_the_tables():
    assert "aten::mul" in html_of(FOUND)
    assert "Not placed" in html_of(FOUND)
