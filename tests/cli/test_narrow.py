"""Answers that are tables fit a screen of 80 columns, also in a pipe."""

import re
from pathlib import Path

import pytest

from flopwise.cli.main import main
from flopwise.records.run import PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run
from flopwise.units import parse_duration

TRACES = Path(__file__).parents[1] / "trace" / "fixtures"


@pytest.fixture
def runs(tmp_path):
    """Two runs with long names."""
    for level in (1000, 2000):
        trial = Trial(workload=workload("tiny", set={"n_layers": 3, "d_model": 128}), sampling=Sampling())
        times = PhaseTimes(phase="step", wall_ns=tuple(range(level, level + 20)))
        point = Point(key=trial.key(), trial=trial, status="ok", phases=(times,))
        with Run.create(tmp_path, "bench", "tiny", "", [point.trial]) as run:
            run.append(point)
    return tmp_path


@pytest.mark.parametrize("verb", ["doctor", "compare", "explain"])
def test_the_answer_fits_a_screen(runs, capsys, verb):
    before, after = (TRACES / f"h200-small-{name}-2steps.kineto.json.gz" for name in ("fp32-naive", "bf16-compiled"))
    words = {
        "doctor": [],
        "compare": ["last~1", "last", "--runs", str(runs)],
        "explain": [str(after), "--against", str(before)],
    }
    with pytest.raises(SystemExit) as ended:
        main([verb, *words[verb]])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if len(line) > 80] == []
    assert len(lines) <= 25


def test_kernels_that_changed_add_up_to_the_gpus_time(capsys):
    before, after = (TRACES / f"h200-small-{name}-2steps.kineto.json.gz" for name in ("fp32-naive", "bf16-compiled"))
    with pytest.raises(SystemExit):
        main(["explain", str(after), "--against", str(before)])
    rows = [re.findall(r"(\S+ (?:ms|µs)|–)(?=  |$)", line) for line in capsys.readouterr().out.splitlines()]
    saved = [parse_duration(row[-1].replace("−", "")) * (-1 if "−" in row[-1] else 1) for row in rows if len(row) == 3]
    assert sum(saved[:-1]) == pytest.approx(saved[-1], rel=0.01)
