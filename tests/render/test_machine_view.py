"""Ceilings as a user reads them."""

import msgspec

from flopwise.predict.datasheet import from_datasheet
from flopwise.records.ceilings import Curve
from flopwise.render.machine_view import ceilings_view
from flopwise.render.table import csv_text, markdown
from flopwise.spec.gpu import gpu


def test_rates_stand_beside_the_datasheet():
    tables, document = ceilings_view(from_datasheet(gpu("h200")))
    text = "\n".join(markdown(table) for table in tables)
    assert "| bf16 | 792 TFLOP/s | 989 TFLOP/s | 80.0 % |" in text
    assert "specified 4.80 TB/s" in text
    assert document["schema"] == "flopwise.ceilings/1"
    assert csv_text(tables[0]).startswith("dtype,measured_flops,specified_flops,share")


def test_what_the_cache_gives_is_said_where_it_shows():
    known = from_datasheet(gpu("h200"))
    curve = Curve(amount=(1e6, 3e7, 6e7, 1e9), ns=(2e3, 6e3, 17e3, 250e3))  # 5 TB/s at 30 MB, 4 TB/s of memory
    found = msgspec.structs.replace(known, memory=known.memory | {"elementwise": curve}, bandwidth_bytes_per_s=4e12)
    text = "\n".join(markdown(table) for table in ceilings_view(found)[0])
    assert "from the cache, up to 30 MB moved: at most 5.00 TB/s" in text

    flat = Curve(amount=(1e6, 1e9), ns=(1e3, 250e3))
    none = msgspec.structs.replace(known, memory=known.memory | {"elementwise": flat}, bandwidth_bytes_per_s=4e12)
    assert none.cache_bytes_per_s is None
    assert "from the cache" not in "\n".join(markdown(table) for table in ceilings_view(none)[0])


def test_attention_is_told_by_backend():
    tables, _ = ceilings_view(from_datasheet(gpu("h200")))
    text = markdown(tables[1])
    assert "forward, 10.0 GFLOP" in text
    assert {row["way"] for row in tables[1].rows} >= {"fp32", "bf16", "bf16, flash", "bf16, triton"}
    rates = {row["way"]: row for row in tables[1].rows}
    assert 0.55 < rates["bf16, flash"]["forward_large"] / rates["bf16"]["forward_large"] < 0.7
