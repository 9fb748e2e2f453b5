"""data-types: what arithmetic finds is what the formats are known to hold."""

import pytest
import torch
from made_rows import measured

from flopwise.experiments.claims.data_types import EXPERIMENT
from flopwise.records.experiment import Place

CPU = Place(device="cpu")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}


@pytest.fixture(scope="module")
def rows():
    return measured(EXPERIMENT)


@pytest.mark.parametrize("name", DTYPES)
def test_arithmetic_finds_what_the_format_is(rows, name):
    found, known = next(row for row in rows if row["format"] == name), torch.finfo(DTYPES[name])
    assert found["resolution"] == known.eps
    assert found["largest"] == known.max
    assert found["smallest_normal"] == known.smallest_normal
    assert found["smallest_subnormal"] == known.smallest_normal * known.eps
    assert found["layer_bytes"] == 12288 * 49152 * known.bits // 8


def test_tf32_is_not_guessed_where_there_is_none(rows):
    row = next(row for row in rows if row["format"] == "tf32")
    assert "largest" not in row
    assert "GPU" in row["how"]


def test_it_can_be_confirmed_and_refuted(rows, pure):
    assert pure(EXPERIMENT, rows, CPU).word == "confirmed"
    kept = [{**row, "tiny_held": 1e-8} for row in rows if "tiny_held" in row]
    assert pure(EXPERIMENT, kept, CPU).word == "refuted here"
    assert pure(EXPERIMENT, rows[:1], CPU).word == "inconclusive"


def test_its_pictures_and_tables_are_of_its_rows(rows):
    typed = EXPERIMENT.read(rows)
    assert all(row["from"] < row["to"] for row in EXPERIMENT.draw(typed, CPU)[0].rows)
    assert len(EXPERIMENT.tabulate(typed, CPU)[0].rows) == 6
