"""A tuning on a cluster is one job on one node; its run arrives here, whole."""

import os
from collections.abc import Callable

import msgspec
import pytest

from flopwise.api import tune as tune_module
from flopwise.api.tune import tune
from flopwise.capture.runners.cluster import Cluster, ClusterRunner, Ended
from flopwise.capture.runners.nodes import Node
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.records.cluster import Returned
from flopwise.records.run import LOST
from flopwise.store import StoredRun, list_runs
from flopwise.store.run import receive
from flopwise.version import __version__


class CalledHere(Cluster):
    """Every job is called in this process when it is asked how it ended."""

    name, at_once = "here", 9

    def __init__(self, end: Callable[[Returned], Ended] = Ended, nodes: tuple[Node, ...] = ()) -> None:
        self.end, self.up, self.jobs, self.shares = end, nodes or (Node(2),), [], []

    def nodes(self):
        return list(self.up)

    def submit(self, job, given):
        self.jobs.append(job)
        self.shares.append(given)
        return len(self.jobs) - 1

    def wait(self, handles, seconds):
        return list(handles)

    def ended(self, handle):
        job = self.jobs[handle]
        return self.end(msgspec.msgpack.decode(job.function(__version__, job.request), type=Returned))

    def cancel(self, handles, force):
        pass

    def close(self):
        pass


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """`--on ray` is played here."""
    monkeypatch.setenv("FLOPWISE_NODE", "")
    monkeypatch.chdir(tmp_path)

    def use(played: Cluster) -> Cluster:
        monkeypatch.setattr(tune_module, "open_cluster", lambda on, shared: ClusterRunner(played))
        return played

    return use


QUICK = {"device": "cpu", "batch": 1, "context": 16, "budget": 1.0, "seconds": 0.1}


def test_the_run_is_stored_here_and_says_on_which_node_it_ran(cluster, tmp_path):
    played = cluster(CalledHere())
    found = tune("tiny", on="ray", runs=tmp_path / "runs", command="flopwise tune tiny --on ray", **QUICK)
    (run,) = list_runs(tmp_path / "runs")
    assert found.run == run.id
    stored = StoredRun.load(run.path)
    assert stored.header.command == "flopwise tune tiny --on ray"
    assert {point.environment.host for point in stored.points} == {os.uname().nodename}
    assert len(played.jobs) == 1
    assert played.shares[0].whole


def test_what_fails_there_is_one_line_here_and_leaves_no_run(cluster, tmp_path):
    cluster(CalledHere(nodes=(Node(8, 1),)))
    with pytest.raises(FlopwiseError, match="cuda"):  # the node said that it has a GPU, and has none
        tune("tiny", on="ray", runs=tmp_path / "runs", **QUICK | {"device": "cuda"})
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_no_node_has_is_refused_before_anything_is_sent(cluster, tmp_path):
    played = cluster(CalledHere())
    with pytest.raises(FlopwiseError, match="can never run this"):
        tune("tiny", on="ray", runs=tmp_path / "runs", **QUICK | {"device": "cuda"})
    assert played.jobs == []


def test_a_node_that_is_lost_every_time_is_an_error(cluster, tmp_path):
    played = cluster(CalledHere())
    played.ended = lambda handle: Ended(status=LOST, reason="its node was lost")
    with pytest.raises(FlopwiseError, match="lost: its node was lost, 3 times"):
        tune("tiny", on="ray", runs=tmp_path / "runs", **QUICK)
    assert len(played.jobs) == 3


@pytest.mark.slow
def test_one_that_was_interrupted_is_kept(cluster, tmp_path):
    def cut(returned):
        return Ended(Returned(files=returned.files, interrupted=True))

    cluster(CalledHere(end=cut))
    with pytest.raises(Interrupted) as stopped:
        tune("tiny", on="ray", runs=tmp_path / "runs", **QUICK)
    assert stopped.value.result.run == list_runs(tmp_path / "runs")[0].id


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"a/run.json": b"", "b/points.jsonl": b""},
        {"a/points.jsonl": b""},
        {"a/run.json": b"", "a/../../x": b""},
        {"/a/run.json": b""},
    ],
)
def test_what_is_no_run_is_not_received(files, tmp_path):
    with pytest.raises(FlopwiseError, match="not a run"):
        receive(tmp_path / "runs", files)
    assert not (tmp_path / "runs").exists()
