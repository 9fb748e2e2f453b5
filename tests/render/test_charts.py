"""Charts: every form is written whole, nothing is fetched, and a name is never code."""

import xml.etree.ElementTree as ElementTree

import pytest

from flopwise.errors import FlopwiseError
from flopwise.render.charts import save
from flopwise.render.roofline_view import roofline_chart

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def chart():
    points = [
        {"name": HOSTILE, "kind": HOSTILE, "intensity": 200.0, "flops_per_s": 5e14, "ms": 2.0},
        {"name": "softmax", "kind": "softmax", "intensity": 1.0, "flops_per_s": 3e12, "ms": 1.0},
    ]
    return roofline_chart(points, {"bf16": 9.89e14, "fp32": 6.7e13}, 4.8e12, HOSTILE, "")


def test_every_form_is_written(chart, tmp_path):
    for suffix in (".svg", ".png", ".html"):
        save(chart, tmp_path / f"roofline{suffix}")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    texts = [e.text for e in ElementTree.parse(tmp_path / "roofline.svg").iter() if e.text]
    assert HOSTILE in texts  # shown as text: the title
    page = (tmp_path / "roofline.html").read_text()
    assert HOSTILE not in page
    assert page.count("</script>") == 1
    assert "default-src 'none'" in page


def test_roofs_bend_where_compute_meets_bandwidth(chart):
    lines = chart.to_dict()["layer"][0]["data"]["values"]
    bends = {row["roof"]: row for row in lines if row["flops_per_s"] == pytest.approx(row["intensity"] * 4.8e12)}
    assert bends["bf16"]["flops_per_s"] <= 9.89e14
    assert max(row["flops_per_s"] for row in lines if row["roof"] == "fp32") == 6.7e13


def test_other_suffixes_and_places_are_refused(chart, tmp_path):
    with pytest.raises(FlopwiseError, match="names no picture"):
        save(chart, tmp_path / "x.gif")
    with pytest.raises(FlopwiseError, match="cannot write"):
        save(chart, tmp_path / "no" / "x.svg")
