"""Training scripts that tests write and run."""

import textwrap

import pytest

from loop_script import LOOP


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script after LOOP; its path."""
    monkeypatch.setenv("FLOPWISE_RUNS", str(tmp_path / "runs"))

    def write(text, name="train.py", loop=LOOP):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(loop + textwrap.dedent(text))
        return str(path)

    return write
