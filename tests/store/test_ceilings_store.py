"""Ceilings are kept whole or not at all, and a damaged file is one line."""

import msgspec
import pytest

from flopwise.errors import FlopwiseError
from flopwise.predict.datasheet import from_datasheet
from flopwise.spec.gpu import gpu
from flopwise.store.ceilings import load_ceilings, save_ceilings


def test_what_was_kept_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(tmp_path / "deep" / "folder"))
    found = from_datasheet(gpu("h200"))
    assert load_ceilings("h200") is None
    path = save_ceilings(found)
    assert load_ceilings("h200") == msgspec.structs.replace(found, file=str(path))
    assert [p.name for p in path.parent.iterdir()] == ["h200.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"gpu": 3}', b"\xff\xfe"])
def test_a_damaged_file_is_one_line(tmp_path, monkeypatch, content):
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(tmp_path))
    (tmp_path / "h200.json").write_bytes(content)
    with pytest.raises(FlopwiseError, match="holds no ceilings"):
        load_ceilings("h200")


def test_a_name_never_leaves_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(tmp_path / "in"))
    assert load_ceilings("../../etc/passwd") is None
    (tmp_path / "in").write_text("a file where the folder should be")
    with pytest.raises(FlopwiseError, match="cannot keep"):
        save_ceilings(from_datasheet(gpu("h200")))


@pytest.mark.parametrize("field", ["matmul", "memory", "attention", "host", "processors"])
def test_what_parses_but_says_nothing_is_one_line_too(tmp_path, monkeypatch, field):
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(tmp_path))
    content = msgspec.to_builtins(from_datasheet(gpu("h200")))
    content[field] = 0 if field == "processors" else {}
    (tmp_path / "h200.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(FlopwiseError, match="holds no ceilings"):
        load_ceilings("h200")
    (tmp_path / "a100.json").write_bytes(msgspec.json.encode(from_datasheet(gpu("h200"))))
    with pytest.raises(FlopwiseError, match="those of h200"):
        load_ceilings("a100")
