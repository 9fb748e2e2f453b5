"""Commands as they are typed, in a folder of their own."""

import pytest

from flopwise.cli.main import main


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs a command; its exit code, and what it printed."""
    monkeypatch.chdir(tmp_path)

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return command
