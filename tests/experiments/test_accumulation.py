"""accumulation: the sums are those that IEEE arithmetic gives, and the verdict follows them."""

import pytest
import torch
from made_rows import measured

from flopwise.experiments.claims.accumulation import COUNT, EVERY, EXPERIMENT, KAHAN, LIBRARY, LOOP, PAIRS
from flopwise.records.experiment import Place

CPU = Place(device="cpu")


@pytest.fixture(scope="module")
def rows():
    return measured(EXPERIMENT)


def sums(rows):
    return [row for row in rows if row["part"] == "result"]


def result(rows, way, of_sum, terms):
    return next(r for r in sums(rows) if (r["way"], r["sum"], r["terms"]) == (way, of_sum, terms))


@pytest.mark.parametrize(
    ("of_sum", "terms", "known"),
    [
        ("fp32", "fp32", 10.000134),
        ("fp32", "fp16", 10.002136),
        ("fp16", "fp16", 9.953125),
        ("fp16", "fp32", 9.953125),
        ("bf16", "bf16", 4.0),  # from 4 on, numbers lie 1/32 apart: 0.01 is less than half of that
    ],
)
def test_one_by_one_gives_the_known_sums(rows, of_sum, terms, known):
    assert result(rows, LOOP, of_sum, terms)["result"] == pytest.approx(known, abs=1e-6)


def test_the_two_errors_are_the_whole(rows):
    for row in sums(rows):
        assert row["term_share"] + row["adding_share"] == pytest.approx(row["off_share"], abs=1e-12)
        assert (
            row["step"]
            == torch.finfo({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[row["sum"]]).eps * 8
        )


def test_kahan_and_pairs_are_within_a_step(rows):
    for way in (KAHAN, PAIRS, LIBRARY):
        for half in ("fp16", "bf16"):
            row = result(rows, way, half, half)
            assert row["adding_off"] <= row["step"]


def test_it_can_be_confirmed_refuted_and_left_open(rows, pure):
    yes = pure(EXPERIMENT, rows, CPU)
    assert yes.word == "confirmed"
    assert "9.95312 in fp16 and 4 in bf16" in yes.why

    def off_by(off, way):
        """The sums of one way, off by this."""
        return [
            {**r, "adding_off": off, "result": 1000 * r["held_term"] + off}
            if r["part"] == "result" and r["way"] == way
            else r
            for r in rows
        ]

    good = off_by(0.0, LOOP)
    assert pure(EXPERIMENT, good, CPU).word == "refuted here"  # a 16-bit sum that loses nothing
    bad = off_by(1.0, KAHAN)
    assert pure(EXPERIMENT, bad, CPU).word == "refuted here"
    assert pure(EXPERIMENT, sums(rows)[:3], CPU).word == "inconclusive"


def test_its_pictures_and_tables_are_of_its_rows(rows):
    typed = EXPERIMENT.read(rows)
    lines, points = EXPERIMENT.draw(typed, CPU)
    assert len(lines.rows) == 4 * COUNT // EVERY
    assert all(row["wrong"] > 0 for row in points.rows)
    assert len(EXPERIMENT.tabulate(typed, CPU)[0].rows) == len(sums(rows))
