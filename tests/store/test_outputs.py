"""Files that users name: whole or not at all, and nothing that is no file is replaced by one."""

import os
import stat
import threading
from pathlib import Path

import pytest

from flopwise.store.files import write_output


def test_a_link_stays_a_link_and_what_it_names_is_written(tmp_path):
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    real.write_text("old")
    link.symlink_to(real)
    write_output(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "later")
    write_output(dangling, "there")
    assert (tmp_path / "later").read_text() == "there"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_written_into(tmp_path):
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    write_output(pipe, "through")
    reader.join(10)
    assert got == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no such device here")
def test_a_full_device_is_an_error_and_stays_a_device(tmp_path):
    link = tmp_path / "full"  # a mistake here would replace the link, not the machine's device
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_output(link, "text")
    assert Path("/dev/full").is_char_device()


def test_what_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    place = tmp_path / "page.md"
    place.write_text("old")
    monkeypatch.setattr("flopwise.atomic.write_all", lambda fd, text: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_output(place, "new")
    assert place.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["page.md"]
