"""coalescing: the verdict follows the bandwidths; a run on the CPU reads what it says it reads."""

import pytest
from made_rows import measured, on_the_wall, timed

from flopwise.experiments.claims import coalescing
from flopwise.experiments.claims.coalescing import BY_COLUMNS, BY_ROWS, EXPERIMENT, STRIDES, draw, shares
from flopwise.records.experiment import Place

GPU, CPU = Place(device="cuda:0"), Place(device="cpu")


def made(left=lambda stride: 1 / min(stride, 8), slower=5.0):
    """Rows of a memory of 1 TB/s of which a stride leaves a share, and that reads columns some times slower than rows."""
    strided = [
        {"part": "strided", "stride": s, "used_bytes": 2**30 // s, "used_bytes_per_s": 1e12 * left(s)} for s in STRIDES
    ]
    ways = ((BY_ROWS, 1.0), (BY_COLUMNS, slower))
    matrix = [
        {"part": "matrix", "way": way, "side": 16384, "used_bytes": 2**30, "used_bytes_per_s": 9e11 / by}
        for way, by in ways
    ]
    return [
        {**row, **timed(row["used_bytes"] / row["used_bytes_per_s"] * 1e9), "span_bytes": 2**30}
        for row in (*strided, *matrix)
    ]


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "1/s of the bandwidth is left up to stride 8; at stride 8 12.5 %" in yes.why
    assert "as if each number cost 32 bytes" in yes.why
    assert "5.0 times slower" in yes.why
    assert pure(EXPERIMENT, made(left=lambda stride: 1.0), GPU).word == "refuted here"  # no loss
    assert pure(EXPERIMENT, made(slower=1.0), GPU).word == "refuted here"  # the order does not matter
    assert pure(EXPERIMENT, made(slower=1.5), GPU).word == "inconclusive"


@pytest.mark.parametrize(
    "left",
    [
        lambda stride: 1 / 8 if stride == 8 else 1.0,  # full bandwidth at every other stride
        lambda stride: 1 / stride if stride <= 8 else 1.0,  # it comes back beyond
        lambda stride: 1 / stride**3,  # it falls much faster
    ],
)
def test_every_stride_counts(pure, left):
    no = pure(EXPERIMENT, made(left=left), GPU)
    assert no.word == "refuted here"
    assert "Not as claimed: stride " in no.why


def test_a_part_of_the_evidence_is_left_open(pure):
    assert pure(EXPERIMENT, [row for row in made() if row.get("stride") != 64], GPU).word == "inconclusive"
    assert pure(EXPERIMENT, made()[:-1], GPU).word == "inconclusive"


def test_unsteady_times_decide_nothing(pure):
    left = pure(EXPERIMENT, [on_the_wall(row, 1 / 3, 3.0) for row in made()], CPU)
    assert left.word == "inconclusive"
    assert "Too uncertain to tell: stride 1 takes " in left.why


def test_the_share_that_is_left_is_of_stride_1():
    found = shares(EXPERIMENT.read(made()))
    assert [row["left_share"] for row in found] == pytest.approx([1, 1 / 2, 1 / 4, *[1 / 8] * 4])
    assert found[-1]["each_bytes"] == pytest.approx(32)


def test_the_chart_has_the_law_beside_the_measurement():
    rows = EXPERIMENT.read(made())
    first = draw(rows, GPU)[0]
    assert len(first.rows) == 2 * len(STRIDES)
    assert "32-byte sector" in first.caption
    assert "cache line" in draw(rows, CPU)[0].caption


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr(coalescing, "CPU_QUICK_BYTES", 2**20)
    monkeypatch.setattr(coalescing, "CPU_QUICK_SIDE", 64)
    rows = measured(EXPERIMENT)
    assert [row["used_bytes"] for row in rows] == [2**20 // stride for stride in STRIDES] + [64 * 64 * 4] * 2
    assert pure(EXPERIMENT, rows, CPU).why
