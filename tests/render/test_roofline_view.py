"""The roofline of a trace as people and programs read it."""

import msgspec
import pytest

from flopwise.analysis.roofline import Roofline, RooflinePoint, Unplaced
from flopwise.cost.datasheet import from_datasheet
from flopwise.render.roofline_view import drawn, roofline_view
from flopwise.spec.gpu import gpu

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
    ("n_bytes", "said"), [(2 << 22, "no larger than the L2 cache"), (1 << 30, "the roof is set too low")]
)
def test_what_lies_above_its_roof_is_explained(n_bytes, said):
    above = msgspec.structs.replace(POINT, roof_flops=1e9, n_bytes=n_bytes)
    (placed, *_), _ = roofline_view(msgspec.structs.replace(FOUND, points=(above,)))
    (note,) = [note for note in placed.notes if "above their roof" in note]
    assert note.startswith("1 above")
    assert said in note


def test_a_lower_bound_is_marked():
    columns = [column.key for column in roofline_view(FOUND)[0][0].columns]
    assert "at_least" not in columns
    marked = msgspec.structs.replace(FOUND, points=(msgspec.structs.replace(POINT, at_least=True, kernels=2),))
    (placed, *_), _ = roofline_view(marked)
    assert "at_least" in [column.key for column in placed.columns]
    assert any(note.startswith("≥") for note in placed.notes)
    assert any("1 launch several kernels" in note for note in placed.notes)
