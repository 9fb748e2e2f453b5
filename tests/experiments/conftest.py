"""Experiments that fail in every way, found by this process and by the worker's; and a place to run them."""

import json
import os
from pathlib import Path

import pytest

import flopwise
from flopwise.experiments import catalog
from flopwise.experiments import claims as folder
from flopwise.experiments.experiment import VERDICTS
from flopwise.render.lab_charts import picture_chart
from flopwise.render.lab_view import shown_table
from flopwise.render.table import shown

HEAD = """
import os, signal, time
from flopwise.errors import Unsupported
from flopwise.experiments.experiment import CONFIRMED, Experiment, Picture, TableOf, Verdict

def measure(bench):
    yield {"n": 1, "wall_ns": 5.0, "word": "<b>|x"}
    {ACT}

def judge(rows, place):
    return Verdict(CONFIRMED, f"{len(rows)} rows on {place.device}")

def draw(rows, place):
    return [Picture(title="t<i>", kind="line", rows=rows, x="n", y="wall_ns", x_title="n", y_title="time")]

def tabulate(rows, place):
    return [TableOf("t", {"n": "n", "wall_ns": "wall", "word": "word"}, rows)]

EXPERIMENT = Experiment(name="{NAME}", number=99, line="l", claim="c <script>", measure=measure, judge=judge, draw=draw,
                        tabulate=tabulate)
"""
ACTS = {
    "made-fine": "yield {'n': 2, 'wall_ns': 6.0, 'word': 'y'}",
    "made-killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "made-oom": "raise MemoryError('too much')",
    "made-slow": "time.sleep(600)",
    "made-unable": "raise Unsupported('this needs another chip')",
    "made-wrong": "raise ValueError('a fault')",
}


@pytest.fixture
def pure():
    """Judges made-up or measured rows, and holds the experiment to its laws; returns the verdict.

    The rows survive JSON with the same verdict, nobody changes them, and what is drawn and tabulated can be shown.
    """

    def judged(experiment, rows, place):
        before = json.dumps(rows, allow_nan=False)
        verdict = experiment.judge(rows, place)
        assert verdict.word in VERDICTS
        assert verdict.why.endswith(".")
        assert experiment.judge(json.loads(before), place) == verdict
        for table in experiment.tabulate(rows, place):
            assert len(shown(shown_table(table)).cells) == len(table.rows)
            assert all(any(key in row for row in table.rows) for key in table.columns)
        for picture in experiment.draw(rows, place):
            named = (picture.x, picture.y, picture.x2, picture.colour, picture.column, picture.low, picture.high)
            assert all(any(name in row for row in picture.rows) for name in named if name)
            assert picture_chart(picture).to_dict(format="vega-lite")
        assert json.dumps(rows, allow_nan=False) == before
        return verdict

    return judged


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The experiments of ACTS, beside the real ones."""
    place = tmp_path / "made"
    place.mkdir()
    for name, act in ACTS.items():
        text = HEAD.replace("{ACT}", act).replace("{NAME}", name)
        (place / f"{name.replace('-', '_')}.py").write_text(text)
    # The worker is another process: it is told by what Python runs at its start.
    (tmp_path / "sitecustomize.py").write_text(
        f"import flopwise.experiments.claims as folder\nfolder.__path__.append({str(place)!r})\n"
    )
    source = str(Path(flopwise.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), source)))
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(place)])
    catalog.experiments.cache_clear()
    yield tuple(ACTS)
    catalog.experiments.cache_clear()
