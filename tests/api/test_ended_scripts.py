"""However a script ends, what was timed is kept, and what the screen says of it can be typed."""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from flopwise.analysis.measured import MeasuredRun
from flopwise.api.run import run
from flopwise.api.watch import Watch, watch
from flopwise.cli.main import main
from flopwise.errors import FlopwiseError
from flopwise.store import find, list_runs, reference
from loop_script import LOOP


def flopwise(*words):
    return subprocess.run(
        [sys.executable, "-m", "flopwise", *words], capture_output=True, text=True, timeout=300, check=False
    )


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("end", ["sys.exit(7)", *slow("os._exit(7)", "raise ValueError", "pass")])
@pytest.mark.slow
def test_a_forked_process_takes_nothing_from_its_parent(script, tmp_path, end):
    path = script(f"""
        for n in range(20_000):
            step()
            if n == 20:
                child = os.fork()
                if child == 0:
                    for _ in range(3): step()
                    {end}
                    break
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                open({str(tmp_path / "code")!r}, "w").write(str(code))
    """)
    done = flopwise("run", "--steps", "5", "--seconds", "0.5", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("5 steps timed") == 1  # by the parent alone
    (only,) = list_runs(tmp_path / "runs")
    (point,) = MeasuredRun.load(only.path).points
    assert (only.path / "traces" / point.trace_file).is_file()
    assert (tmp_path / "code").read_text() == {"raise ValueError": "1", "pass": "0"}.get(end, "7")


def test_where_no_run_can_be_stored_nothing_is_begun(script, tmp_path, monkeypatch):
    path = script("print('begun')")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLOPWISE_RUNS", str(tmp_path / "file"))
    with pytest.raises(FlopwiseError, match="cannot create a run in") as error:
        run(path)
    assert "FLOPWISE_RUNS" in error.value.hint
    with pytest.raises(FlopwiseError, match="cannot create a run in"):
        Watch().open()


@pytest.mark.slow
def test_a_kill_while_steps_are_timed_keeps_those_that_were(script, tmp_path):
    path = script("""
        cleaned = []
        try:
            for n in range(100_000):
                step()
                if n == 5_000:
                    os.kill(os.getpid(), signal.SIGTERM)
        finally:
            print("cleaned up")
    """)
    done = flopwise("run", "--steps", "90000", path)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "cleaned up" in done.stdout
    assert "the script was killed" in done.stdout
    (point,) = MeasuredRun.load(find("last", tmp_path / "runs")).points
    assert 0 < len(point.times().wall_ns) <= 5_000


@pytest.mark.slow
def test_a_scripts_own_way_to_end_is_left_alone(script):
    path = script("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        for n in range(100_000):
            step()
            if n == 5_000:
                os.kill(os.getpid(), signal.SIGTERM)
    """)
    assert flopwise("run", "--steps", "90000", path).returncode == 9


@pytest.mark.parametrize("end", ["raise ValueError", *slow("sys.exit(3)", "os.kill(os.getpid(), signal.SIGINT)", "")])
@pytest.mark.parametrize("elsewhere", [False, *slow(True)])
@pytest.mark.slow
def test_the_last_line_names_a_command_that_shows_this_run(script, tmp_path, end, elsewhere, monkeypatch, capsys):
    """The law: what the screen tells to type shows the tables of this very run."""
    path = script(f"""
        for n in range(100_000):
            step()
            if n == 5_000:
                {end or "pass"}
    """)
    monkeypatch.chdir(tmp_path)
    where = ["--runs", "other"] if elsewhere else []
    shown = flopwise("run", "--steps", "90000" if end else "5", *where, os.path.basename(path)).stdout
    line = re.search(r"^All tables: flopwise (.+ --full)$", shown, re.MULTILINE)[1]
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    assert ended.value.code == 0
    assert ("train.py" if end else "kineto trace") in capsys.readouterr().out


def test_a_run_is_named_by_the_shortest_name_that_finds_it(script, tmp_path):
    path, root = script("while True: step()"), tmp_path / "runs"
    first, second = (run(path, steps=4, traced=0).path for _ in range(2))
    assert reference(second, root) == "last"
    assert reference(first, root) != "last"
    assert find(reference(first, root), root) == first
    assert find(reference(first, tmp_path), tmp_path).resolve() == first


@pytest.mark.slow
def test_a_loop_around_its_batches_ends_with_the_screen(script, capsys):
    names = {}
    exec(LOOP, names)
    for _ in watch(range(20_000), steps=4, traced=0):
        names["step"]()
    assert "4 steps timed: loop" in capsys.readouterr().out
    for _ in watch(range(3)):
        names["step"]()
        if os.getpid() == 0:
            break
    assert capsys.readouterr().out == "flopwise: 3 steps were seen, too few to time any\n"


@pytest.mark.slow
def test_a_kill_without_a_warning_keeps_what_was_stored_meanwhile(script, tmp_path):
    path = script("""
        from flopwise.capture.loop import watcher
        watcher.KEPT_EVERY_S, keep, kept = 0.0, watcher.LoopWatcher._keep, []
        watcher.LoopWatcher._keep = lambda self: kept.append(1) or keep(self)
        while len(kept) < 12:
            step()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = flopwise("run", "--steps", "90000", "--seconds", "0.2", path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (point,) = MeasuredRun.load(find("last", tmp_path / "runs")).points
    assert len(point.times().wall_ns) == 12
    step, *phases = (one.wall_ns for one in point.phases)
    assert all(sum(parts) == whole for whole, *parts in zip(step, *phases, strict=True))
