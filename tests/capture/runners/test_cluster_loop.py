"""The driver's side of a cluster: every trial has one row, whatever the cluster loses."""

import itertools
from pathlib import Path

import msgspec
import pytest

from flopwise.capture.point_builder import PointBuilder
from flopwise.capture.progress import Progress
from flopwise.capture.runners import cluster, open_runner
from flopwise.capture.runners.cluster import ATTEMPTS, Cluster, ClusterRunner, Ended
from flopwise.capture.runners.node_side import Folder, measure_here
from flopwise.capture.runners.nodes import Node
from flopwise.errors import FlopwiseError
from flopwise.records.cluster import Returned, TrialRequest
from flopwise.records.events import Done
from flopwise.records.run import INTERRUPTED, LOST, OK, OOM
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.version import __version__

_STEPS = Path(__file__).parents[1]  # where py:steps is
TRIALS = [Trial(workload=workload("tiny", batch=n), sampling=Sampling(samples=1), device="cpu") for n in (1, 2, 3)]
GONE = Ended(status=LOST, reason="its node was lost")


def row(trial, status=OK, files=None):
    return Ended(Returned(point=PointBuilder(trial).point(Done(status=status)), files=files or {}))


class Notes(Progress):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class PlayedCluster(Cluster):
    """Ends one job at each look, in the order sent; `plays` says how each attempt of a batch size ends."""

    name = "played"

    def __init__(self, plays=None, at_once=10):
        self.plays = {n: iter(ends) for n, ends in (plays or {}).items()}
        self.up, self.at_once = [Node(4)], at_once
        self.jobs, self.cancelled, self.most, self.closed = {}, [], 0, False
        self.numbers = itertools.count()

    def nodes(self):
        return list(self.up)

    def submit(self, job, given):
        handle = next(self.numbers)
        self.jobs[handle] = msgspec.msgpack.decode(job.request, type=TrialRequest).trial
        self.most = max(self.most, len(self.jobs))
        return handle

    def wait(self, handles, seconds):
        return handles[:1]

    def ended(self, handle):
        trial = self.jobs.pop(handle)
        end = next(self.plays.get(trial.workload.batch, iter(())), None) or row(trial)
        if isinstance(end, BaseException):
            raise end
        return end

    def cancel(self, handles, force):
        self.cancelled += [(handle, force) for handle in handles]

    def close(self):
        self.closed = True


def rows(played, tmp_path, progress=None):
    folder = Folder(tmp_path)
    with ClusterRunner(played) as runner:
        return list(runner.measure(TRIALS, folder, progress or Progress(), lambda trial: None))


def statuses(points):
    return {point.trial.workload.batch: point.status for point in points}


def test_a_lost_trial_is_sent_again_and_the_table_is_the_same(tmp_path):
    notes = Notes()
    lost_twice = rows(PlayedCluster({2: [GONE, GONE]}), tmp_path, notes)
    whole = rows(PlayedCluster(), tmp_path)
    assert {p.key for p in lost_twice} == {p.key for p in whole} == {t.key() for t in TRIALS}
    assert statuses(lost_twice) == statuses(whole) == {1: OK, 2: OK, 3: OK}
    assert notes.notes == ["tiny b2 t128 train: its node was lost; sent again"] * 2


def test_after_a_few_losses_the_row_says_so(tmp_path):
    (lost,) = [p for p in rows(PlayedCluster({2: [GONE] * 9}), tmp_path) if p.status != OK]
    assert (lost.status, lost.reason) == (LOST, f"its node was lost, {ATTEMPTS} times")
    assert lost.hint


def test_out_of_memory_is_a_row_at_once(tmp_path):
    played = PlayedCluster({1: [Ended(status=OOM, reason="short of memory")]})
    assert statuses(rows(played, tmp_path)) == {1: OOM, 2: OK, 3: OK}
    assert next(played.numbers) == 3  # sent once each


def test_no_more_jobs_are_sent_than_the_cluster_takes(tmp_path):
    played = PlayedCluster(at_once=2)
    assert len(rows(played, tmp_path)) == 3
    assert played.most == 2


def test_a_cluster_that_takes_no_more_jobs_gets_the_rest_later(tmp_path):
    played, submit = PlayedCluster(), PlayedCluster.submit

    def full(job, given):
        if played.jobs:
            raise FlopwiseError("sbatch refuses the job: QOSMaxSubmitJobPerUserLimit")
        return submit(played, job, given)

    played.submit = full
    assert statuses(rows(played, tmp_path)) == {1: OK, 2: OK, 3: OK}
    assert played.most == 1


def test_a_first_node_that_cannot_run_flopwise_ends_all_in_one_line(tmp_path):
    broken = Ended(Returned(problem="n1: cannot import torch", hint="pip install 'flopwise[torch]'"))
    with pytest.raises(FlopwiseError, match="n1: cannot import torch"):
        rows(PlayedCluster({1: [broken]}), tmp_path)
    assert statuses(rows(PlayedCluster({2: [broken]}), tmp_path)) == {
        1: OK,
        2: OK,
        3: OK,
    }  # a later one is one bad node


def test_what_no_node_is_left_for_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "LOOK_S", 0.0)
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.0)
    played = PlayedCluster()
    wait = iter([[], [], []])

    def waits(handles, seconds):
        played.up = []
        return next(wait)

    played.wait = waits
    points = rows(played, tmp_path)
    assert statuses(points) == {1: LOST, 2: LOST, 3: LOST}
    assert "no node that is up" in points[0].reason
    assert played.cancelled == [(0, True), (1, True), (2, True)]


def test_ctrl_c_keeps_what_was_running_and_takes_the_rest_back(tmp_path):
    played = PlayedCluster({2: [KeyboardInterrupt()]})
    points, asked = [], played.ended
    played.ended = lambda handle: row(TRIALS[2], INTERRUPTED) if played.cancelled else asked(handle)

    def interrupted():
        for point in runner.measure(TRIALS, Folder(tmp_path), Progress(), lambda trial: None):
            points.append(point)  # noqa: PERF402

    with ClusterRunner(played) as runner, pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [point.status for point in points] == [OK, INTERRUPTED]
    assert (2, False) in played.cancelled  # asked to stop before it is ended
    assert played.closed


def test_a_file_that_belongs_nowhere_is_not_written(tmp_path):
    played = PlayedCluster({1: [row(TRIALS[0], files={"../../x": b""})]})
    with pytest.raises(FlopwiseError, match="belongs nowhere"):
        rows(played, tmp_path)


def test_files_of_the_node_are_the_runs(tmp_path):
    key = TRIALS[0].key()
    files = {f"logs/{key}.log": b"said\n", f"traces/{key}.kineto.json.gz": b"trace"}
    rows(PlayedCluster({1: [row(TRIALS[0], files=files)]}), tmp_path)
    assert (tmp_path / "logs" / f"{key}.log").read_bytes() == b"said\n"
    assert (tmp_path / "traces" / f"{key}.kineto.json.gz").read_bytes() == b"trace"


def test_the_plan_is_checked_before_anything_is_sent():
    played = PlayedCluster()
    plain = Trial(workload=workload("tiny"), sampling=Sampling(), device="cuda")
    with pytest.raises(FlopwiseError, match="can never run this"):
        ClusterRunner(played).check([*TRIALS, plain])
    with pytest.raises(FlopwiseError, match="nothing for nsys to see on 'cpu'"):
        ClusterRunner(played).check([msgspec.structs.replace(plain, device="cpu", trace="nsys")])
    assert next(played.numbers) == 0


@pytest.mark.parametrize("on", ["rays", "", "ray:/x", 3])
def test_an_unknown_runner_names_those_there_are(on, tmp_path):
    with pytest.raises(FlopwiseError) as refused:
        open_runner(on, tmp_path)
    assert "slurm" in refused.value.hint


def test_a_node_measures_as_this_machine_does_and_says_which_it_is(own_step, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(_STEPS), prepend=":")
    monkeypatch.setenv("FLOPWISE_NODE", "")  # so that it is put back
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    monkeypatch.chdir(tmp_path)
    for name, status in (("chatty", OK), ("crashes", "crash"), ("out_of_memory", OOM)):
        trial = own_step(name)
        asked = msgspec.msgpack.encode(TrialRequest(trial=trial, folder=str(tmp_path)))
        returned = msgspec.msgpack.decode(measure_here(__version__, asked), type=Returned)
        assert (returned.point.status, returned.point.key) == (status, trial.key())
        assert returned.point.environment.host == "node-7"
    traced = msgspec.structs.replace(own_step("chatty"), trace="kineto")
    asked = msgspec.msgpack.encode(TrialRequest(trial=traced, folder=str(tmp_path)))
    returned = msgspec.msgpack.decode(measure_here(__version__, asked), type=Returned)
    assert b"noise" in returned.files[f"logs/{returned.point.key}.log"]
    assert returned.files[f"traces/{returned.point.trace_file}"].startswith(b"\x1f\x8b")  # gzip


def test_another_version_on_the_node_is_said(own_step, monkeypatch, tmp_path):
    monkeypatch.setenv("FLOPWISE_NODE", "")
    monkeypatch.chdir(tmp_path)
    asked = msgspec.msgpack.encode(TrialRequest(trial=own_step("matmul"), folder=str(tmp_path)))
    returned = msgspec.msgpack.decode(measure_here("0.0.1", asked), type=Returned)
    assert returned.point is None
    assert f"flopwise {__version__}, and the driver 0.0.1" in returned.problem
