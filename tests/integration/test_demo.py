"""The demo: the main job on 40 lines without a GPU, live with one. What it measures is tested elsewhere."""

from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from flopwise.analysis.explanation import Explanation
from flopwise.api import demo as demo_verb
from flopwise.api.demo import TRACE, TUNING, Title, demo
from flopwise.capture.doctor import GOOD, Check
from flopwise.errors import FlopwiseError
from flopwise.records.tuning import Tuning
from flopwise.store.tuning import read_tuning


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with this device, and what was asked of it; nothing is measured."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def of(found, benched=None):
        def noted(verb, answer):
            def call(target, **options):
                asked.append((verb, target, options.get("attention")))
                if isinstance(answer, FlopwiseError):
                    raise answer
                return answer

            return call

        monkeypatch.setattr(demo_verb, "doctor", lambda: [Check(name="device", state=GOOD, found=found)])
        monkeypatch.setattr(demo_verb, "bench", noted("bench", benched or SimpleNamespace(points=())))
        monkeypatch.setattr(demo_verb, "profile", noted("profile", TRACE))
        monkeypatch.setattr(demo_verb, "tune", noted("tune", read_tuning(TUNING)))
        monkeypatch.setattr(demo_verb, "report", lambda *targets, output, **options: asked.append(targets) or output)
        return asked

    return of


def test_without_a_gpu_the_step_is_the_one_that_ships(machine, tmp_path):
    asked = machine("cpu: no CUDA GPU is seen")
    (tmp_path / "report.html").write_text("somebody's own")
    told = []
    demo(told.append)
    assert [type(part) for part in told[:4]] == [Title, Explanation, Title, Tuning]
    assert [one[0] for one in asked[:-1]] == ["bench"]
    assert asked[-1][:2] == (TRACE, TUNING)
    assert told[-1] == tmp_path / "report-2.html"  # nothing is replaced


def test_with_a_gpu_the_step_is_traced_and_tuned_here(machine):
    asked = machine("cuda:0: NVIDIA H200")
    demo(lambda part: None)
    assert asked[:2] == [("profile", "small", "naive"), ("tune", "small", "naive")]


def test_it_is_one_page_of_text_and_works_without_torch(machine, cli, tmp_path):
    machine("", FlopwiseError("torch is not installed", "pip install 'flopwise[torch]'"))
    result = cli("demo", "--quiet")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 38  # with two of progress: 40
    assert max(map(cell_len, lines[:-2])) <= 80
    assert "not measured: torch is not installed" in result.stdout
    assert str(tmp_path / "report.html") in result.stdout
    assert "Compute in bf16" in result.stdout
