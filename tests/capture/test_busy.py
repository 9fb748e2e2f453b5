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
        monkeypatch.setattr(busy, "PROC", tmp_path)
        monkeypatch.setattr(busy.time, "sleep", lambda _: path.write_text(texts[1]))
        return busy.busy_machine(busy.busy_cores())

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
    monkeypatch.setattr(busy, "PROC", tmp_path / "missing")
    assert busy.busy_cores(0.0) == 0.0
    assert busy.OthersUse().cores() in (None, 0.0)


def test_its_own_processes_are_not_counted_among_the_others(monkeypatch, tmp_path):
    """Two cores all in use: half of it by this process and its child, one of them dead and waited for."""

    def write(own, all_in_use):
        (tmp_path / "stat").write_text(stat(all_in_use, 0))
        for process, parent, ticks in ((os.getpid(), 1, own), (os.getpid() + 1, os.getpid(), own), (3, 2, 10_000)):
            folder = tmp_path / str(process)
            folder.mkdir(exist_ok=True)
            spent = f"0 {ticks}" if process == os.getpid() else f"{ticks} 0"
            (folder / "stat").write_text(f"{process} (a) name) S {parent} 0 0 0 0 0 0 0 0 0 {spent} 0 0 20")

    monkeypatch.setattr(busy, "PROC", tmp_path)
    clock = iter((0.0, 10.0))
    monkeypatch.setattr(busy.time, "monotonic", lambda: next(clock))
    write(0, 0)
    use = busy.OthersUse()
    write(100 * len(CORES), 400)  # of each core
    assert use.cores() == pytest.approx(len(CORES) / 2)


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
    monkeypatch.setattr(bench_verb, "busy_machine", lambda cores: "it is busy" if cores else "")
    monkeypatch.setattr(bench_verb, "busy_cores", lambda: 1.0)
    with pytest.raises(Stops):
        bench_verb.bench("tiny", device=device, runs=tmp_path, progress=notes)
    assert notes.texts == told
