"""Tiles and waves of one product, for a named GPU."""

import json

import pytest
from click.testing import CliRunner

from flopwise.api.roofline import roofline
from flopwise.cli.account import command as account_command
from flopwise.cli.roofline import command


def tiles(side, gpu="a100"):
    found = roofline("op:matmul", set={"dim": side}, precision="bf16", gpu=gpu)
    return {one.tile: one for one in found.tiles}, found


@pytest.mark.parametrize(("side", "grid", "count", "waves"), [(1792, "7 × 14", 98, 1), (1793, "8 × 15", 120, 2)])
def test_an_a100_needs_one_wave_more_for_1793(side, grid, count, waves):
    one = tiles(side)[0]["256 × 128"]
    assert (one.grid, one.tiles, one.waves) == (grid, count, waves)
    assert one.last_share == pytest.approx((count - 108 * (waves - 1)) / 108)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("side", [256, 1000, 1792, 4096, 5003])
@pytest.mark.parametrize("gpu", ["a100", "h200", "l4"])
def test_tiles_cover_the_result_in_as_few_waves_as_there_can_be(side, gpu):
    by_tile, found = tiles(side, gpu)
    sms = found.ceilings.processors
    for one in by_tile.values():
        m, n = (int(word) for word in one.tile.split(" × "))
        rows, columns = (int(word) for word in one.grid.split(" × "))
        assert (rows - 1) * m < side <= rows * m
        assert (columns - 1) * n < side <= columns * n
        assert one.tiles == rows * columns
        assert (one.waves - 1 + one.last_share) * sms == pytest.approx(one.tiles)
    assert (
        found.points[0].ns >= 0.99 * min(one.ns for one in by_tile.values()) / 2
    )  # a split of K may be shorter, not by much


def test_unaligned_rows_are_told_and_cost():
    (aligned,), (odd,) = tiles(4096, "h200")[1].points, tiles(4097, "h200")[1].points
    assert odd.ns > 3 * aligned.ns
    assert any("16 bytes" in note for note in tiles(4097, "h200")[1].notes)
    assert not any("16 bytes" in note for note in tiles(4096, "h200")[1].notes)


def test_sides_by_short_options():
    asked = ["op:matmul", "--m", "64", "--n", "128", "--k", "256", "--gpu", "h200", "--format", "json"]
    answered = CliRunner().invoke(command, asked)
    assert answered.exit_code == 0, answered.output
    assert json.loads(answered.output)["points"][0]["shapes"] == "[64, 256] [256, 128]"
    assert CliRunner().invoke(account_command, ["small", "--m", "64"]).exit_code != 0
