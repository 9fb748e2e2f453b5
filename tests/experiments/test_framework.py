"""Runs of the lab: whatever an experiment does, it is a row, and the rest go on; what is stored can be read and shown."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

import flopwise
from flopwise.api.lab import lab, outcome
from flopwise.api.report import report
from flopwise.capture.environment import environment
from flopwise.cli.main import main
from flopwise.errors import FlopwiseError
from flopwise.experiments import catalog, claims
from flopwise.experiments.bench import Bench
from flopwise.experiments.experiment import Axis, Picture, Rule, table_of
from flopwise.experiments.results import AS_STORED, LAB, LAB_RUNNING, LabRun, Planned, Result, answer, read_lab
from flopwise.experiments.verdict import Verdict
from flopwise.records.experiment import Place
from flopwise.render.lab_charts import picture_chart, stacked
from flopwise.render.lab_view import lab_view, summary
from flopwise.render.table import shown
from flopwise.store import find, list_runs

HEAD = """
import os, signal, time
from flopwise.errors import Unsupported
from flopwise.experiments.experiment import Axis, Experiment, table_of, columns, line
from flopwise.experiments.rows import Row, values
from flopwise.experiments.verdict import said

class Made(Row, frozen=True):
    n: int
    wall_ns: float
    word: str

def measure(bench):
    yield Made(1, 5.0, "<b>|x")
    {ACT}

def judge(rows, place):
    yield said(f"{len(rows)} rows on {place.device}")

def draw(rows, place):
    return [line(values(rows), Axis("n", "n"), Axis("wall_ns", "time")).titled("t<i>")]

def tabulate(rows, place):
    return [table_of("t", columns("n", "wall_ns", "word"), values(rows))]

EXPERIMENT = Experiment(99, "{NAME}", "l", "c <script>", (Made,), measure, judge, draw, tabulate)
"""
ACTS = {
    "made-fine": "yield Made(2, 6.0, 'y')",
    "made-killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "made-oom": "raise MemoryError('too much')",
    "made-slow": "time.sleep(600)",
    "made-unable": "raise Unsupported('this needs another chip')",
    "made-wrong": "raise ValueError('a fault')",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The experiments of ACTS, besides the real ones, for this process and for the worker's."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "claims").mkdir()
    for name, act in ACTS.items():
        text = HEAD.replace("{ACT}", act).replace("{NAME}", name)
        (folder / "claims" / f"{name.replace('-', '_')}.py").write_text(text)
    # The worker is another process: Python runs this at its start.
    extended = f"claims.__path__.append({str(folder / 'claims')!r})"
    (folder / "sitecustomize.py").write_text(f"import flopwise.experiments.claims as claims\n{extended}\n")
    source = str(Path(flopwise.__file__).parents[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), source)))
        patch.setattr(claims, "__path__", [*claims.__path__, str(folder / "claims")])
        catalog.experiments.cache_clear()
        yield tuple(ACTS)
    catalog.experiments.cache_clear()


@pytest.fixture(scope="module")
def lab_run(made, tmp_path_factory):
    """One run of all of them, and its folder."""
    runs = tmp_path_factory.mktemp("runs")
    return lab(*made, device="cpu", quick=True, timeout=2.0, runs=runs), runs


@pytest.mark.slow
def test_every_end_is_a_row_and_the_rest_go_on(tmp_path, lab_run):
    found, runs = lab_run
    assert {result.experiment: result.status for result in found.results} == {
        "made-fine": "ok",
        "made-killed": "crash",
        "made-oom": "oom",
        "made-slow": "timeout",
        "made-unable": "unsupported",
        "made-wrong": "error",
    }
    words = {result.experiment: result.verdict.word for result in found.results}
    assert words["made-fine"] == "confirmed"
    assert words["made-unable"] == "not measurable here"
    assert words["made-killed"] == "inconclusive"
    assert "SIGKILL" in found.results[1].verdict.why
    assert all(result.rows[0]["n"] == 1 for result in found.results)  # what came before the end is kept
    assert outcome(found) == 0
    listed = list_runs(runs)[0]
    assert (listed.kind, listed.ok, listed.failed, listed.planned, listed.complete) == ("lab", 1, 5, 6, True)
    page = report("last", output=tmp_path / "page.html", runs=runs).read_text()
    assert "<script>alert" not in page
    assert "c <script>" not in page
    assert "c &lt;script&gt;" in page
    text = report("last", output=tmp_path / "page.md", runs=runs).read_text()
    assert "&lt;b>\\|x" in text
    tables, document = lab_view(found)
    assert [one["status"] for one in document["experiments"]] == [result.status for result in found.results]
    assert json.loads(json.dumps(document))
    assert tables[0].title == summary(found)


def test_nothing_measured_is_an_error_with_its_reason(lab_run):
    unable = tuple(result for result in lab_run[0].results if result.experiment == "made-unable")
    with pytest.raises(FlopwiseError, match="this needs another chip"):
        outcome(LabRun("r", Planned(experiments=("made-unable",)), unable))


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(tmp_path, made):
    words = ["lab", "made-fine", "made-slow", "--device", "cpu", "--runs", str(tmp_path / "runs")]
    with subprocess.Popen([sys.executable, "-m", "flopwise", *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith("[1/2] made-fine: confirmed")
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert process.returncode == 130
    found = read_lab(find("last", tmp_path / "runs"))
    ends = {result.experiment: result.status for result in found.results}
    assert ends in ({"made-fine": "ok", "made-slow": "interrupted"}, {"made-fine": "ok"})  # as it had begun, or not yet


@pytest.mark.slow
def test_a_kill_keeps_what_was_measured(tmp_path, made):
    runs = tmp_path / "runs"
    words = ["lab", "made-fine", "made-slow", "--device", "cpu", "--runs", str(runs)]
    with subprocess.Popen([sys.executable, "-m", "flopwise", *words], stderr=subprocess.PIPE, text=True) as process:
        process.stderr.readline()  # the first has ended
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(
            b'"row"' in f.read_bytes() for f in runs.glob(f"*/{LAB_RUNNING}")
        ):
            time.sleep(0.05)
        process.kill()
    found = read_lab(find("last", runs))
    assert [(r.experiment, r.status, len(r.rows)) for r in found.results] == [
        ("made-fine", "ok", 2),
        ("made-slow", "interrupted", 1),
    ]
    last = found.answers()[-1]
    assert (last.verdict.word, len(last.tables)) == ("inconclusive", 1)
    assert report("last", output=tmp_path / "page.html", runs=runs).is_file()


def test_rows_of_an_experiment_that_was_cut_off_are_read(tmp_path, lab_run):
    found, runs = lab_run
    run = tmp_path / found.run
    shutil.copytree(runs / found.run, run)
    assert not (run / LAB_RUNNING).exists()  # what is done has one file
    planned, first = (run / LAB).read_bytes().splitlines()[:2]
    (run / LAB).write_bytes(planned + b"\n" + first + b"\n")
    row = msgspec.json.encode({"experiment": "made-slow", "row": {"n": 1, "wall_ns": 5.0, "word": "x"}})
    (run / LAB_RUNNING).write_bytes(row + b'\n{"experiment":"made-sl')
    cut = read_lab(run).results[-1]
    assert (cut.experiment, cut.status, len(cut.rows)) == ("made-slow", "interrupted", 1)


def test_a_row_cut_off_by_a_kill_is_left_out(tmp_path, lab_run):
    found, runs = lab_run
    shutil.copytree(runs / found.run, tmp_path / found.run)
    file = tmp_path / found.run / LAB
    file.write_bytes(file.read_bytes() + b'{"type":"result","exper')
    assert read_lab(file.parent) == found


def test_a_workload_is_refused_by_who_takes_none(tmp_path):
    with pytest.raises(FlopwiseError, match="'data-types' takes no workload"):
        lab("data-types", workload="tiny", runs=tmp_path)
    with pytest.raises(FlopwiseError, match="no model preset 'tinny'"):
        lab("data-types", "warmup", workload="tinny", runs=tmp_path)  # one of them takes it
    with pytest.raises(FlopwiseError, match="nothing to run"):
        lab(runs=tmp_path)
    assert not list_runs(tmp_path)


def test_rows_that_todays_code_cannot_judge_keep_their_verdict_and_say_so():
    kept = Verdict("confirmed", "as it was")
    old = Result(
        experiment="warmup", claim="old", status="ok", verdict=kept, rows=({"other": 1},), place=Place(device="cpu")
    )
    said = Verdict("confirmed", f"{AS_STORED}: as it was")
    assert (answer(old).verdict, answer(old).claim) == (said, "old")
    unknown = msgspec.structs.replace(old, experiment="gone")
    assert (answer(unknown).verdict, answer(unknown).claim) == (said, "old")
    strange = msgspec.structs.replace(old, verdict=Verdict("confirmed, trust me", "x"))
    assert answer(strange).verdict.word == "inconclusive"


def test_a_busy_machine_is_told():
    cores = environment(torch.device("cpu"))
    result = Result(experiment="warmup", claim="c", status="ok", verdict=Verdict("confirmed", "x."))

    def notes(load):
        place = Place(device="cpu", environment=cores, load=load)
        found = LabRun("r", Planned(experiments=("warmup",)), (msgspec.structs.replace(result, place=place),))
        return " ".join(lab_view(found)[0][0].notes)

    assert "the machine was busy when warmup began" in notes(10.0 * cores.cpu_cores)
    assert "busy" not in notes(0.5 * cores.cpu_cores)
    assert "busy" not in notes(None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ALL"], "did you mean 'all'"),
        (["data-types", "--device", "cpu:7"], "use auto, cpu, cuda or cuda:N"),
        (["--quick"], "nothing was run: name an experiment"),
        (["--device=cpu"], "nothing was run: name an experiment"),
    ],
)
def test_what_is_meant_is_told(capsys, tmp_path, words, said):
    with pytest.raises(SystemExit):
        main(["lab", *words, *(["--runs", str(tmp_path)] if len(words) > 1 else [])])
    assert said in capsys.readouterr().err


def test_quiet_with_a_picture_prints_nothing(capsys, tmp_path, lab_run, monkeypatch):
    pytest.importorskip("vl_convert")
    found, runs = lab_run
    monkeypatch.setattr("flopwise.api.lab.lab", lambda *names, **given: found)
    place = tmp_path / "x.svg"
    words = ["lab", "made-fine", "--device", "cpu", "--runs", str(runs), "-o", str(place)]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "-q"])
    assert capsys.readouterr().out == ""
    assert place.is_file()


def test_the_clock_reads_what_was_run(monkeypatch):
    bench = Bench(torch.device("cpu"), quick=True)
    calls = []
    timing = bench.time(lambda: calls.append(1), seconds=0.01)
    assert timing.samples >= 2
    assert len(calls) > timing.samples * timing.repeats  # warm-up beside
    assert timing.gpu_ns is None
    assert timing.launch_ns is None
    assert 0 < timing.wall_low_ns <= timing.wall_ns <= timing.wall_high_ns
    assert timing.took_ns == timing.wall_ns
    assert bench.time(lambda: None, repeats=1, seconds=0.01).repeats == 1
    with pytest.raises(FlopwiseError, match="a CUDA graph needs a GPU"):
        bench.graphed(lambda: None)


ROWS = [
    {"n": n, "wall_ns": 1000.0 * n, "low_ns": 900.0 * n, "high_ns": 1100.0 * n, "how": how}
    for n in (1, 100)
    for how in "ab"
]
N, WALL, NAMES = Axis("n", "n"), Axis("wall_ns", "time"), Axis("how")
LOG = Axis("wall_ns", "time", log=True, interval=("low_ns", "high_ns"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "picture",
    [
        Picture("line", ROWS, Axis("n", "n", log=True), LOG, colour="how", title="t"),
        Picture("bar", ROWS, N, WALL, colour="how", title="t"),
        Picture("scatter", ROWS, N, WALL, column="how", rules=(Rule("y", 5e3, "limit"),), title="t"),
        Picture("span", ROWS, Axis("low_ns", "n", to="high_ns"), NAMES, rules=(Rule("x", 5e3, "limit"),), title="t"),
        Picture("line", ROWS, N, Axis("missing_ns", "time"), title="t"),
    ],
)
def test_every_kind_of_picture_is_drawn_and_keeps_its_rows(picture):
    vl_convert = pytest.importorskip("vl_convert")
    before = json.dumps(ROWS)
    spec = picture_chart(picture).to_dict(format="vega-lite")
    assert vl_convert.vegalite_to_svg(spec).startswith("<svg")
    assert vl_convert.vegalite_to_svg(stacked([picture, picture]).to_dict(format="vega-lite"))
    assert json.dumps(ROWS) == before


def test_a_table_shows_units_by_name():
    table = table_of("t", {"how": "how", "wall_ns": "wall"}, ROWS[-1:])
    assert shown(table).cells == [["b", "100 µs"]]
