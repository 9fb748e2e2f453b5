"""The demo profiles and explains; it ends with a page. What it measures is tested elsewhere."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from flopwise.analysis.explanation import Explanation
from flopwise.api import demo as demo_verb
from flopwise.api.demo import Title, demo
from flopwise.api.explain import explain
from flopwise.capture.doctor import GOOD, Check

TRACE = Path(__file__).parent.parent / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """The demo's parts on a machine with this device, nothing of it measured."""

    def tell(found, trace_file):
        profiled = SimpleNamespace(points=[SimpleNamespace(trace_file=trace_file)])
        monkeypatch.setattr(demo_verb, "doctor", lambda: [Check(name="device", state=GOOD, found=found)])
        monkeypatch.setattr(demo_verb, "bench", lambda target, **options: SimpleNamespace(points=()))
        monkeypatch.setattr(demo_verb, "compare_within", lambda run: None)
        monkeypatch.setattr(demo_verb, "sweep", lambda swept, **options: "sweep")
        monkeypatch.setattr(demo_verb, "profile", lambda target, **options: profiled)
        monkeypatch.setattr(demo_verb, "explain", lambda run: explain(TRACE))
        monkeypatch.setattr(demo_verb, "memory", lambda target, **options: f"memory {target}")
        monkeypatch.setattr(demo_verb, "account", lambda target, **options: f"account {target}")
        monkeypatch.setattr(demo_verb, "report", lambda *targets, output, **options: output)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "report.html").write_text("somebody's own")
        told = []
        demo(told.append, runs="somewhere/runs")
        assert told[-1] == tmp_path / "report-2.html"  # where one is, and nothing is replaced
        assert [told[-5], told[-3]] == [f"memory {'small' if 'cuda' in found else 'tiny'}", "account small"]
        return told[:-6]

    return tell


def test_on_a_gpu_the_profile_is_explained(parts):
    told = parts("cuda:0: NVIDIA H200", "key.kineto.json.gz")
    assert "flopwise profile small" in [part.text for part in told if isinstance(part, Title)][-1]
    assert isinstance(told[-1], Explanation)


def test_on_a_cpu_the_profile_is_explained_too(parts):
    told = parts("cpu: no CUDA GPU is seen", "key.kineto.json.gz")
    assert "flopwise profile tiny" in [part.text for part in told if isinstance(part, Title)][-1]
    assert isinstance(told[-1], Explanation)


def test_a_profile_that_failed_is_shown_and_not_explained(parts):
    told = parts("cuda:0: NVIDIA H200", "")
    assert told[-1].points[0].trace_file == ""
