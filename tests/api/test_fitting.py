"""The warning before a run that will probably not fit, and that every verb that runs something gives it."""

import contextlib
from contextlib import AbstractContextManager

import pytest

from flopwise.api import bench, memory, profile, sweep
from flopwise.capture.interleave import Contested
from flopwise.capture.progress import Progress
from flopwise.capture.runners import local
from flopwise.errors import Failed, FlopwiseError
from flopwise.predict.fit import too_large
from flopwise.predict.prediction import peak_bytes
from flopwise.records.events import DeviceInfo
from flopwise.records.run import OOM, Environment, Gpu, Point
from flopwise.render.memory_view import memory_view
from flopwise.spec.gpu import gpu
from flopwise.spec.sweep import sweep_from
from flopwise.spec.workload import workload


def there(free_bytes, on_gpu):
    h200 = Gpu(name="NVIDIA H200", memory_bytes=0, sm_count=132, l2_bytes=0, capability="9.0")
    environment = Environment(flopwise="", python="", torch="", gpu=h200 if on_gpu else None)
    return DeviceInfo(environment=environment, device="", free_bytes=free_bytes)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_warning_comes_where_the_prediction_exceeds_what_is_free(on_gpu):
    work = workload("small")
    needed = peak_bytes(work, gpu("h200" if on_gpu else "cpu"))
    assert too_large(work, there(needed, on_gpu)) == ""
    assert "it will probably run out of memory" in too_large(work, there(needed - 1, on_gpu))


@pytest.mark.parametrize("target", ["op:attention", "py:steps:make"])
def test_what_arithmetic_does_not_know_is_not_warned_of(target):
    assert too_large(workload(target), there(1, on_gpu=True)) == ""
    assert too_large(workload("small"), there(None, on_gpu=True)) == ""


# Every verb.


class FullGpu(AbstractContextManager):
    """A worker on a GPU with a kilobyte free, where everything runs out of memory."""

    def __init__(self, compiler=False):
        pass

    def __exit__(self, *_):
        pass

    def look(self, device):
        return there(1024, on_gpu=True)

    def run(self, trial, log=None, on_event=None, trace=None, memory=None):
        return Point(key=trial.key(), trial=trial, status=OOM, reason="CUDA out of memory")

    def dry_run(self, *_):
        raise FlopwiseError("not here")

    def close(self):
        pass


class FullContest:
    def __init__(self, *_, **__):
        pass

    def run(self, trials, rule):
        return Contested(points=tuple(map(FullGpu().run, trials)), stopped="")

    def close(self):
        pass


class Notes(Progress):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


SWEEP = {"name": "s", "base": {"workload": "tiny"}, "group": {"g": {"batch": [1, 2]}}}
VERBS = {
    "bench": (bench, lambda **options: bench.bench("tiny", **options), 1),
    "versus": (bench, lambda **options: bench.bench("tiny", versus={"batch": 8}, **options), 2),
    "profile": (profile, lambda **options: profile.profile("tiny", **options), 1),
    "sweep": (local, lambda **options: sweep.sweep(sweep_from(SWEEP), **options), 2),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_warns_before_it_runs(verb, monkeypatch, tmp_path):
    module, call, warnings = VERBS[verb]
    monkeypatch.setattr(module, "Worker", FullGpu)
    if verb == "versus":
        monkeypatch.setattr(module, "Contest", FullContest)
    notes = Notes()
    with contextlib.suppress(Failed):  # all but a sweep
        call(runs=tmp_path, progress=notes)
    assert len(notes.texts) == warnings
    assert all("of 1.00 KiB free: it will probably run out of memory" in text for text in notes.texts)


def test_memory_that_ran_out_before_anything_was_recorded_says_what_it_would_need(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "Worker", FullGpu)
    notes = Notes()
    run = memory.capture(
        workload("tiny"), device="cuda", steps=1, record="off", timeout=60, root=tmp_path, command="", progress=notes
    )
    found = memory.stored_report(run)
    assert (len(notes.texts), found.status, found.devices) == (1, OOM, ())
    assert any("it would have needed" in note and "shape simulator" in note for note in found.notes)
    titles = [table.title for table in memory_view(found)[0]]
    assert titles[1:] == ["What it would need", "What each lever would change"]
    with pytest.raises(FlopwiseError, match="oom: CUDA out of memory"):
        memory.outcome(found)
