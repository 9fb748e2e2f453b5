"""Scripts are run as Python would run them, watched, and ended when enough was seen."""

import signal
import subprocess
import sys
import textwrap

import pytest

from flopwise.analysis.measured import MeasuredRun
from flopwise.api.run import run
from flopwise.api.watch import watch
from flopwise.capture.loop.script import Program, after_import
from flopwise.errors import FlopwiseError
from flopwise.store import find, list_runs
from loop_script import LOOP


def test_a_script_is_ended_politely_and_its_run_stored(script, capsys):
    path = script("""
        try:
            while True:
                step()
        except Exception:
            print("caught")
        finally:
            print("cleaned up", __name__, sys.argv[1:])
    """)
    found = run(path, ["--debug", "x y"], steps=5)
    (point,) = found.points
    assert len(point.times().wall_ns) == 5
    assert point.trace_file
    assert (found.path / "traces" / point.trace_file).is_file()
    assert found.header.kind == "run"
    assert "cleaned up __main__ ['--debug', 'x y']" in capsys.readouterr().out


@pytest.mark.slow
def test_with_go_on_it_runs_to_its_own_end_and_has_its_exit_code(script, capsys):
    path = script("""
        for n in range(5000): step()
        print("all", n)
        sys.exit(3)
    """)
    found = run(path, steps=5, traced=1, go_on=True)
    assert "all 4999" in capsys.readouterr().out
    assert len(found.points[0].times().wall_ns) == 5


def test_a_script_that_fails_shows_its_own_frames_only(script, capsys):
    path = script("""
        def inner(): raise ValueError("bad luck")
        for _ in range(3): step()
        inner()
    """)
    with pytest.raises(FlopwiseError, match="the script failed; 3 steps were seen") as error:
        run(path)
    assert error.value.exit_code == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[0] == "Traceback (most recent call last):"
    assert "bad luck" in shown
    assert "flopwise" not in shown.replace(path, "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no step of an optimizer was seen"),
        ("step()", "1 steps were seen"),
        ("sys.exit(5)", "no step of an optimizer"),
    ],
)
def test_too_little_to_see_is_one_line(script, text, told):
    with pytest.raises(FlopwiseError, match=told) as error:
        run(script(text))
    assert "watch" in error.value.hint
    assert error.value.exit_code == (5 if "exit" in text else 2)


def test_modules_and_relative_imports_run(script, tmp_path, monkeypatch):
    script("", "package/__init__.py", loop="")
    script("", "package/parts.py")
    script("from .parts import step\nwhile True: step()", "package/train.py", loop="")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("package.train", module=True, steps=5, traced=0).points[0].trial.workload.target == "package.train"


def test_what_a_script_sees_of_itself_is_as_in_python(script):
    path = script(
        """
        import os, sys
        told = (__name__, __file__, sys.modules["__main__"].told_by, os.path.basename(sys.path[0]))
        """,
        loop="told_by = 'me'\n",
    )
    program, argv, main = Program(path, ["a"]), list(sys.argv), sys.modules["__main__"]
    with program.as_main():
        program.run()
        seen = sys.modules["__main__"].told
    assert seen[:3] == ("__main__", path, "me")
    assert (sys.argv, sys.modules["__main__"]) == (argv, main)


@pytest.mark.parametrize(
    ("text", "told"), [("def f(:", "line 1: invalid syntax"), ("\0", "null"), (None, "there is no script")]
)
def test_what_is_no_script_is_one_line(tmp_path, text, told):
    path = tmp_path / "x.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FlopwiseError, match=told):
        Program(str(path), [])


def test_torch_is_met_when_the_script_imports_it(tmp_path, monkeypatch):
    (tmp_path / "not_yet_imported.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    forget = after_import("not_yet_imported", lambda: seen.append(sys.modules["not_yet_imported"].value))
    assert not seen
    import not_yet_imported  # noqa: F401

    assert seen == [1]
    forget()
    after_import("not_yet_imported", lambda: seen.append(2))
    assert seen == [1, 2]


def test_watch_in_its_three_ways(script):
    names = {}
    exec(LOOP, names)
    with watch(steps=4, traced=0) as loop:
        while loop.run is None:
            names["step"]()
    assert len(loop.run.points[0].times().wall_ns) == 4
    around = watch(range(100_000), steps=4, traced=0)
    for _ in around:
        names["step"]()
        if around.run is not None:
            break
    assert around.run.header.kind == "watch"
    with watch(steps=4, traced=0) as loop:
        while loop.run is None:
            loop.step()
    assert len(loop.run.points[0].times().wall_ns) == 4


def test_watch_without_steps_says_so(script):
    with watch() as loop:
        pass
    with pytest.raises(FlopwiseError, match="no step of an optimizer was seen"):
        loop.report()
    with pytest.raises(FlopwiseError, match="nothing to iterate over"):
        list(watch())
    with pytest.raises(FlopwiseError, match="not watched yet"):
        watch().step()


@pytest.mark.parametrize("by", ["run", "watch"])
@pytest.mark.slow
def test_what_was_timed_outlives_a_kill_while_steps_are_traced(script, tmp_path, by):
    loop = """
        while True:
            step()
            if torch.autograd._profiler_enabled():
                os.kill(os.getpid(), signal.SIGKILL)
    """
    opening = "import os, signal\nimport flopwise\n"
    if by == "run":
        words = ["-m", "flopwise", "run", "--steps", "7", script(opening + textwrap.dedent(loop))]
    else:
        watched = "with flopwise.watch(steps=7):" + textwrap.indent(textwrap.dedent(loop), "    ")
        words = [script(opening + watched)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = MeasuredRun.load(find("last", tmp_path / "runs"))
    (point,) = found.points
    assert (len(point.times().wall_ns), point.trace_file, found.complete) == (7, "", True)
    assert {times.phase for times in point.phases} >= {"step", "forward", "backward", "optimizer"}
    assert "7 steps timed" in str(found)


def test_a_look_that_comes_to_its_end_has_one_point_with_its_trace(script):
    found = run(script("while True: step()"), steps=5)
    assert len((found.path / "points.jsonl").read_text().splitlines()) == 2  # without the trace, then with it
    (point,) = found.points
    assert point.trace_file
    assert [summary.ok for summary in list_runs(found.path.parent)] == [1]
