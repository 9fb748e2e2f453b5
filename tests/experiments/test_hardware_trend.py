"""hardware-trend: the figures are those of the GPU table; the verdict follows their growth."""

import pytest
from made_rows import measured

from flopwise.experiments.claims.hardware_trend import EXPERIMENT, YEARS
from flopwise.records.experiment import Place
from flopwise.spec.gpu import find_gpu

CPU = Place(device="cpu")


@pytest.fixture(scope="module")
def rows():
    return measured(EXPERIMENT)


def test_every_gpu_of_the_table_is_there(rows, pure):
    assert [row["gpu"] for row in rows[:-1]] == [name for name in YEARS if find_gpu(name)]
    b200 = next(row for row in rows if row.get("gpu") == "b200")
    assert b200["peak_flops_per_s"] / b200["memory_bytes_per_s"] == find_gpu("b200").ridge("bf16")
    found = pure(EXPERIMENT, rows, CPU)
    assert found.word == "confirmed"
    assert "H100 295, H200 206, B200 281" in found.why
    assert "Not at every step: H200 has a lower ridge than the one before" in found.why
    assert "This machine: " in found.why


@pytest.mark.parametrize("field", ["memory_bytes_per_s", "link_bytes_per_s"])
def test_a_memory_or_links_that_grew_faster_refute_it(rows, pure, field):
    grown = [row | {field: 100 * row[field]} if row.get("gpu") == "b200" else row for row in rows]
    assert pure(EXPERIMENT, grown, CPU).word == "refuted here"


def test_two_generations_are_no_trend(rows, pure):
    assert pure(EXPERIMENT, rows[-3:], CPU).word == "inconclusive"
