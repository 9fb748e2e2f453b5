"""warmup: the verdict follows the steps; a process can be started cold and tells its steps."""

import pytest
from made_rows import measured

from flopwise.experiments.claims.warmup import EXPERIMENT, STEPS, WARMUPS, summaries
from flopwise.records.experiment import Place

CPU = Place(device="cpu")


def made(first, rest=(100, 101, 99)):
    """Two starts whose steps take `first`, and then `rest` again and again."""
    walls = [*first, *(rest[i % len(rest)] for i in range(STEPS - len(first)))]
    return [
        {"start": start, "step": step, "wall_ns": wall * 1000, "workload": "made"}
        for start in (1, 2)
        for step, wall in enumerate(walls)
    ]


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    assert pure(EXPERIMENT, made([2000, 150]), CPU).word == "confirmed"
    assert pure(EXPERIMENT, made([100]), CPU).word == "refuted here"
    assert pure(EXPERIMENT, made([5000, *[300] * 14]), CPU).word == "inconclusive"  # five steps are not enough here


def test_a_busy_machine_leaves_it_open(pure):
    """What three runs on a busy machine told: 5.5 %, 2.9 % and 1.9 % above a step that itself spreads by more."""
    for first in (160, 130, 120):
        found = pure(EXPERIMENT, made([first], rest=(100, 112, 90)), CPU)
        assert found.word == "inconclusive"
        assert "Too uncertain to tell" in found.why
    slower = [{**row, "wall_ns": row["wall_ns"] * (15 if row["start"] == 2 else 1)} for row in made([2000])]
    assert pure(EXPERIMENT, slower, CPU).word == "inconclusive"


def test_a_start_that_was_cut_off_does_not_count(pure):
    rows = made([2000, 150])
    assert pure(EXPERIMENT, rows[:-3], CPU).why.endswith("(cold starts: 1).")
    assert "no start" in pure(EXPERIMENT, rows[:7], CPU).why


def test_a_mean_is_of_the_ten_steps_after_the_warm_up():
    found = {row.warmups: row for row in summaries(EXPERIMENT.read(made([1000], rest=(100,))))}
    assert tuple(found) == WARMUPS
    assert found[0].mean_ns == pytest.approx(190_000)
    assert found[0].off_share == pytest.approx(0.9)
    assert found[1].mean_ns == found[5].mean_ns == 100_000
    assert found[1].spread_ns == 0


def test_its_pictures_and_tables_are_of_its_rows():
    rows = EXPERIMENT.read(made([2000, 150]))
    assert len(EXPERIMENT.draw(rows, CPU)[0].rows) == 2 * STEPS
    assert len(EXPERIMENT.tabulate(rows, CPU)[0].rows) == len(WARMUPS)


@pytest.mark.slow
def test_a_quick_run_on_the_cpu(pure):
    rows = measured(EXPERIMENT)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["wall_ns"] > 0 for row in rows)
    assert pure(EXPERIMENT, rows, CPU).why
