"""A file that was named on the command line and cannot be read: said in one line with a hint, and never waited for."""

import gzip
import os
import shutil
from pathlib import Path

import pytest

from flopwise.cli.main import main

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
NSYS = FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz"
LONG = "x" * 5000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.json")
    os.mkfifo("pipe.sqlite")
    os.symlink("gone.json", "link.json")
    os.mkdir("folder.json")
    shutil.copy(NSYS, "packed.json.gz")
    Path("plain.json").write_bytes(gzip.decompress(NSYS.read_bytes()))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("explain", "pipe.json"), "pipe.json: it is not a regular file", "write it to a file"),
        (("explain", "pipe.sqlite"), "pipe.sqlite: it is not a regular file", "write it to a file"),
        (("explain", "none.json"), "none.json: there is no such file", "check the path"),
        (("explain", "none.sqlite"), "none.sqlite: there is no such file", "check the path"),
        (("explain", "/none/x"), "/none/x: there is no such file", "check the path"),
        (("explain", "link.json"), "link.json: it is a link to gone.json, which does not exist", "fix the link"),
        (("explain", "folder.json"), "folder.json: it is a folder", ".json"),
        (("explain", "/dev/null"), "/dev/null: it is not a regular file", "flopwise runs"),
        (("explain", "plain.json"), "plain.json is an SQLite file", "rename it plain.sqlite"),
        (("explain", "packed.json.gz"), "packed.json.gz is an SQLite file", "rename it packed.sqlite.gz"),
        (("explain", LONG), "the name is too long", "flopwise runs"),
        (("explain", LONG + ".json"), "the name is too long", ".json"),
        (("runs", "scrub", "pipe.json", "-o", "o.json"), "pipe.json: it is not a regular file", "write it to a file"),
        (("runs", "scrub", "none.json", "-o", "o.json"), "none.json: there is no such file", "check the path"),
        (("runs", "scrub", "folder.json", "-o", "o.json"), "folder.json: it is a folder", ".json"),
        (("runs", "scrub", "plain.json", "-o", "no/o.sqlite"), "there is no folder no", "make the folder"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_it_is_one_line_and_a_hint(words, message, hint, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    said = capsys.readouterr().err
    assert left.value.code == 2
    first, second = said.splitlines()
    assert message in first
    assert hint in second
    assert "output" not in said
