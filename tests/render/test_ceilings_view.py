"""Ceilings as a user reads them."""

from flopwise.cost.datasheet import from_datasheet
from flopwise.render.ceilings_view import ceilings_view
from flopwise.render.table import csv_text, markdown
from flopwise.spec.gpu import gpu


def test_rates_stand_beside_the_datasheet():
    tables, document = ceilings_view(from_datasheet(gpu("h200")))
    text = "\n".join(markdown(table) for table in tables)
    assert "| bf16 | 792 TFLOP/s | 989 TFLOP/s | 80.0 % |" in text
    assert "specified 4.80 TB/s" in text
    assert document["schema"] == "flopwise.ceilings/1"
    assert csv_text(tables[0]).startswith("dtype,measured_flops,specified_flops,share")
