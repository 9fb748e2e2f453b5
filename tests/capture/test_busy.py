"""A busy machine is said in one line; what cannot be read is no error."""

import os

import pytest

from flopwise.api import bench as bench_verb
from flopwise.capture import busy
from flopwise.capture.progress import Progress
from flopwise.records.events import DeviceInfo
from flopwise.records.run import Environment

CORES = sorted(os.sched_getaffinity(0))


def stat(in_use, idle):
    """/proc/stat with so many ticks of every core; a core that is not this process's is all in use."""
    rows = [f"cpu{core} {in_use} 0 0 {idle} 0 0 0 0 0 0" for core in CORES]
    return "\n".join([f"cpu  {in_use} 0 0 {idle} 0 0 0 0 0 0", *rows, "cpu100000 9999 0 0 0 0 0 0 0 0 0", "intr 1 2"])


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """Two readings of /proc/stat, one after the other."""

    def asked(*texts):
        path = tmp_path / "stat"
        path.write_text(texts[0])
        monkeypatch.setattr(busy, "STAT", path)
        monkeypatch.setattr(busy.time, "sleep", lambda _: path.write_text(texts[1]))
        return busy.busy_machine()

    return asked


def test_other_processes_are_counted_in_cores(reads):
    line = reads(stat(100, 100), stat(190, 110))
    assert f"other processes use {0.9 * len(CORES):.1f} of {len(CORES)} cores" in line
    assert len(line.splitlines()) == 1


def test_an_idle_machine_is_not_mentioned(reads):
    assert reads(stat(100, 100), stat(101, 10_000)) == ""


@pytest.mark.parametrize("text", ["", "cpu0 a b c", "cpu0 1", "cpuX 1 2 3 4 5", stat(100, 100)])
def test_what_cannot_be_read_is_no_error(reads, text):
    assert reads(text, text) == ""


def test_a_system_without_proc_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(busy, "STAT", tmp_path / "missing")
    assert busy.busy_machine(0.0) == ""


@pytest.mark.parametrize(("device", "told"), [("cpu", ["it is busy"]), ("cuda:0", [])])
def test_bench_says_so_on_the_cpu_alone(monkeypatch, tmp_path, device, told):
    class Stops(Exception):
        pass

    class There:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def look(self, _):
            return DeviceInfo(environment=Environment(flopwise="", python="", torch=""), device=device)

    class Notes(Progress):
        def __init__(self):
            self.texts = []

        def note(self, text):
            self.texts.append(text)

        def trial(self, trial):
            raise Stops

    notes = Notes()
    monkeypatch.setattr(bench_verb, "Worker", There)
    monkeypatch.setattr(bench_verb, "busy_machine", lambda: "it is busy")
    with pytest.raises(Stops):
        bench_verb.bench("tiny", device=device, runs=tmp_path, progress=notes)
    assert notes.texts == told
