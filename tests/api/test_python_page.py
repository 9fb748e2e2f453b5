"""docs/reference/python.md: every public name is on it, and its examples run."""

import re
from pathlib import Path

import pytest

import flopwise

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_every_public_name_is_on_the_page():
    assert [name for name in flopwise.__all__ if not re.search(rf"`flopwise\.{name}\b", PAGE)] == []
    assert set(re.findall(r"flopwise\.(\w+)", PAGE)) <= set(flopwise.__all__)


@pytest.mark.slow
def test_the_examples_run_in_their_order(tmp_path, monkeypatch, capsys):
    """They share what they define; the file that they import is one of them."""
    (file,) = (block for block in BLOCKS if block.startswith("# my_steps.py"))
    (tmp_path / "my_steps.py").write_text(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FLOPWISE_RUNS", str(tmp_path / "runs"))
    shared = {"__name__": "examples"}
    for code in (block for block in BLOCKS if block is not file):
        exec(compile(code, f"python.md: {code.splitlines()[0]}", "exec"), shared)
        assert capsys.readouterr().out
