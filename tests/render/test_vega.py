"""Vega's bundle is made once and kept; what is kept is used only if it is whole."""

import pytest

from flopwise.render import vega

vl_convert = pytest.importorskip("vl_convert")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """How often the bundle was made; the cache folder is the test's own."""
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda text: calls.append(text) or "a </script> b <!-- c")
    vega.vega_javascript.cache_clear()
    yield calls
    vega.vega_javascript.cache_clear()


def again():
    vega.vega_javascript.cache_clear()
    return vega.vega_javascript()


def kept(tmp_path):
    (found,) = (tmp_path / "flopwise").iterdir()
    return found


def test_it_is_made_once(made, tmp_path):
    first = vega.vega_javascript()
    assert "</script" not in first
    assert "<!--" not in first
    assert again() == first
    assert len(made) == 1
    assert kept(tmp_path).name.startswith("vega-")


@pytest.mark.parametrize("damage", ["", "// sha256 0\nalert(1)", "\udcff"])
def test_what_is_damaged_is_made_again(made, tmp_path, damage):
    first = vega.vega_javascript()
    kept(tmp_path).write_text(damage, errors="surrogateescape")
    assert again() == first
    assert len(made) == 2


def test_a_folder_that_cannot_be_made_is_no_error(made, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert vega.vega_javascript()
    assert again()
    assert len(made) == 2
