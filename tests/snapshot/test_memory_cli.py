"""`flopwise memory` as a user meets it."""

import csv
import io
import json
import os
import pickle
import xml.etree.ElementTree as ElementTree

import pytest
from gen_snapshot import made

from flopwise.cli.main import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshots")
    for name, options in {"leak": {"leak_bytes": 5000, "steps": 7}, "oom": {"oom_at_step": 1}}.items():
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(made(**options)[0]))
    return folder


@pytest.fixture
def run(capsys):
    def running(*words):
        with pytest.raises(SystemExit) as ended:
            main(["memory", *map(str, words)])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return running


def test_tables_say_peak_owners_stacks_and_the_leak(files, run):
    code, out, _ = run(files / "leak.pickle", "--full")
    assert code == 0
    for words in (
        "peak allocated",
        "optimizer state",
        "owner known for 92.9 % of the peak (by stacks and lifetimes, not certain); 7.1 % guessed from the size alone",
        "gpt.py:77 forward",
        "5.00 KiB",
    ):
        assert words in out
    assert "█" in out


def test_an_oom_says_what_was_asked_and_what_was_free(files, run):
    _, out, _ = run(files / "oom.pickle", "--full")
    row = out.partition("Out of memory")[2].splitlines()[2].split()
    assert row[:4] == ["64.0", "MiB", "3.00", "MiB"]


def test_one_screen_says_who_holds_the_peak_what_grows_and_what_was_asked_for(files, run):
    grows, oom = (run(files / f"{name}.pickle")[1] for name in ("leak", "oom"))
    for out in (grows, oom):
        assert len(out.splitlines()) <= 25
        assert max(map(len, out.splitlines())) <= 80
        assert "measured: the peak" in out
    assert "Memory grows by 5.00 KiB per step." in grows
    assert "Out of memory: 64.0 MiB more were asked for." in oom


def test_json_is_the_documented_schema_and_stacks_are_whole_on_request(files, run):
    _, out, _ = run(files / "leak.pickle", "--format", "json")
    document = json.loads(out)
    device = document["devices"][0]
    assert document["schema"] == "flopwise.memory/1"
    assert sum(device["peak"]["owners"].values()) == device["peak"]["allocated_bytes"]
    assert device["largest"][0]["frames"] == []
    line = device["timeline"]
    assert len(line["event"]) == len(line["reserved_bytes"]) == len(line["owners"]["parameters"]) <= 2000
    _, out, _ = run(files / "leak.pickle", "--format", "json", "--stacks")
    frames = json.loads(out)["devices"][0]["growth"]["leaks"][0]["frames"]
    assert {"file": "/home/me/gpt.py", "line": 77, "name": "forward"} in frames


def test_csv_and_markdown(files, run):
    _, out, _ = run(files / "leak.pickle", "--format", "csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert rows[0] == ["# leak.pickle: memory, measured"]
    assert rows[1][:3] == ["device", "peak_bytes", "reserved_bytes"]
    _, out, _ = run(files / "leak.pickle", "--format", "markdown")
    assert "| owner | size |" in out


@pytest.mark.slow
def test_the_timeline_is_drawn(files, run, tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    code, _, err = run(files / "leak.pickle", "-o", tmp_path / "chart.svg")
    texts = {e.text for e in ElementTree.parse(tmp_path / "chart.svg").iter() if e.text}
    assert (code, "wrote" in err) == (0, True)
    assert {"optimizer state", "activations", "backward", "allocated, MiB"} <= texts


@pytest.mark.slow
def test_a_pictures_legend_has_room_for_a_wider_font(files, run, tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    run(files / "leak.pickle", "-o", tmp_path / "chart.html")
    page = (tmp_path / "chart.html").read_text()
    assert '"right": 45' in page
    assert '"labelLimit": 0' in page


def test_a_picture_names_its_suffixes_and_takes_no_format(files, run, tmp_path):
    code, _, err = run(files / "leak.pickle", "-o", tmp_path / "x.pdf")
    assert (code, ".svg, .png, .html" in err) == (2, True)
    code, _, err = run(files / "leak.pickle", "-o", tmp_path / "x.svg", "--format", "json")
    assert (code, "is a picture, and --format json" in err.splitlines()[0]) == (2, True)


class Runs:
    def __reduce__(self):
        return os.system, ("false",)


BAD = {
    "no run": ("tinny", "no workload, no snapshot and no run"),
    "no file": ("none.pickle", "there is no file"),
    "a payload": (pickle.dumps([Runs()]), "tries to load posix.system"),
    "cut off": (pickle.dumps(made(steps=1)[0])[:999], "cut off"),
    "another pickle": (pickle.dumps([1, 2]), "not a memory snapshot"),
    "JSON": (b"{}", "it is JSON"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_exit_code_2(kind, run, tmp_path):
    target, said = BAD[kind]
    if isinstance(target, bytes):
        (tmp_path / "x.pickle").write_bytes(target)
        target = tmp_path / "x.pickle"
    code, out, err = run(target)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[0]
    assert len(err.splitlines()) <= 2


def test_a_device_that_is_not_there(files, run):
    code, _, err = run(files / "leak.pickle", "--device", "cuda:3")
    assert (code, "it has: cuda:0" in err) == (2, True)
    assert run(files / "leak.pickle", "--device", "cuda:0")[0] == 0


def test_the_verb_can_be_called_though_the_room_has_its_name(files):
    import flopwise.snapshot.read  # puts the room where the verb was

    assert flopwise.memory(files / "leak.pickle").devices[0].growth.leaks
