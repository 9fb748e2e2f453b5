"""A Ray cluster on this machine: the same table whatever is killed, and nothing left behind."""

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest

import flopwise
from flopwise.capture.progress import Progress
from flopwise.capture.runners import open_runner
from flopwise.capture.runners.ray import RayCluster
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.records.run import CRASH, INTERRUPTED, LOST, OK, OOM
from flopwise.spec.sweep import Sweep
from flopwise.spec.workload import Sampling, Trial, workload

SOURCE, HERE = Path(flopwise.__file__).parents[1], Path(__file__).parent


def trial(name, samples=3, **arguments):
    made = workload(f"py:{name}", set=arguments)
    return Trial(workload=made, sampling=Sampling(warmup=0, samples=samples, timeout_s=120.0), device="cpu")


def plan(*trials):
    return Sweep(name="s", trials=trials)


def table(run):
    """What a run says, but for its times."""
    return [
        (p.key, p.status, p.reason, [(one.phase, len(one.wall_ns)) for one in p.phases], p.ran and p.ran.device)
        for p in run.points
    ]


@pytest.fixture(scope="module")
def alone():
    """No cluster but the tests' own, in a folder of its own: the names of Ray's sockets must be short."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'flopwise[ray]'")
    folder = tempfile.mkdtemp(prefix="fw", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", "300")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (SOURCE, HERE, HERE.parent))))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(alone):
    """A head without CPUs, and two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
    )
    made.client = f"ray://127.0.0.1:{port}"
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.fixture
def two_nodes(cluster, monkeypatch):
    """With another node for one that was killed."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    dead = [node for node in cluster.worker_nodes if not node.remaining_processes_alive()]
    for node in dead:
        cluster.remove_node(node)
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(num_cpus=1)
    return cluster


@pytest.mark.slow
def test_a_trial_has_its_row_from_a_ray_that_is_started_here(alone, tmp_path):
    run = flopwise.sweep(plan(trial("ray_steps:steady")), on="ray", runs=tmp_path)
    assert [point.status for point in run.points] == [OK]
    assert len(run.points[0].times().wall_ns) == 3
    assert run.points[0].environment.host == socket.gethostname()
    assert run.complete


class FailsToJoin:
    """Ray, but for the first `failures` tries to join, each of which leaves it half done."""

    def __init__(self, failures):
        self.failures, self.tries, self.half_done = failures, 0, False

    def is_initialized(self):
        return False

    def init(self, **_):
        assert not self.half_done
        self.tries += 1
        if self.tries <= self.failures:
            self.half_done = True
            raise ConnectionError("Starting Ray client server failed")

    def shutdown(self):
        self.half_done = False


@pytest.mark.parametrize("failures", [1, 2])
def test_a_ray_that_did_not_start_is_tried_once_more_and_is_never_left_half_joined(monkeypatch, failures):
    played = FailsToJoin(failures)
    monkeypatch.setattr("flopwise.capture.runners.ray._import_ray", lambda: played)
    monkeypatch.setattr("flopwise.capture.runners.ray._running_here", lambda: "")
    if failures == 1:
        RayCluster().close()
    else:
        with pytest.raises(FlopwiseError, match="no Ray cluster answers at this machine: Starting"):
            RayCluster()
    assert (played.tries, played.half_done) == (2, False)


class AtFirstRow(Progress):
    """Does something when the first row has come."""

    def __init__(self, do):
        self.do, self.notes = do, []

    def point(self, point):
        do, self.do = self.do, lambda: None
        do()

    def note(self, text):
        self.notes.append(text)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["worker", "node"])
def test_a_worker_or_node_that_is_killed_changes_nothing_in_the_table(two_nodes, tmp_path, capfd, lost):
    trials = plan(*(trial("ray_steps:steady", samples=60 if n else 5, n=n) for n in range(4)))
    calm = flopwise.sweep(trials, on="local", runs=tmp_path / "calm")

    def kill():  # the first row is of the shortest trial: the next one is running on the other node
        ray_worker = parent(min(steps()))
        for process in (parent(ray_worker), ray_worker) if lost == "node" else (ray_worker,):
            os.kill(process, signal.SIGKILL)

    killed = AtFirstRow(kill)
    rough = flopwise.sweep(trials, on="ray", runs=tmp_path / "rough", progress=killed)
    assert table(rough) == table(calm)
    assert {point.status for point in rough.points} == {OK}
    assert len(rough.points) == 4
    assert len(killed.notes) == 1
    assert killed.notes[0].endswith("its worker or its node was lost; sent again")
    assert capfd.readouterr().out == ""  # where data goes


@pytest.mark.slow
def test_a_worker_lost_once_is_replaced_and_one_lost_always_is_a_row_that_is_tried_again(two_nodes, tmp_path):
    counts = [str(tmp_path / name) for name in ("once", "always")]
    trials = plan(
        trial("ray_steps:ends_its_worker", times=1, count=counts[0]),
        trial("ray_steps:ends_its_worker", times=3, count=counts[1]),
    )
    run = flopwise.sweep(trials, on="ray", runs=tmp_path / "runs")
    assert [point.status for point in run.points] == [OK, LOST]
    assert run.points[1].reason == "its worker or its node was lost, 3 times"
    assert not run.complete
    again = flopwise.sweep(trials, on="ray", runs=tmp_path / "runs")  # the fourth attempt goes well
    assert again.path == run.path
    assert [point.status for point in again.points] == [OK, OK]
    assert again.complete


@pytest.mark.slow
def test_what_the_cluster_never_has_is_refused_at_once_and_leaves_no_run(two_nodes, tmp_path):
    asked = msgspec.structs.replace(trial("ray_steps:steady"), device="cuda")
    began = time.monotonic()
    with pytest.raises(FlopwiseError, match=r"can never run this: it needs a GPU, and of [34] nodes there is none"):
        flopwise.sweep(plan(asked), on="ray", runs=tmp_path / "runs")
    assert time.monotonic() - began < 60  # not for ever
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_ends_the_tasks_and_keeps_what_they_had_measured(two_nodes, tmp_path):
    trials = plan(*(trial("ray_steps:steady", samples=100_000, n=n) for n in range(4)))

    def interrupt():
        deadline = time.monotonic() + 60
        while len(steps()) < 6 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted) as stopped:
        flopwise.sweep(trials, on="ray", runs=tmp_path / "runs")
    points = stopped.value.result.points
    assert {point.status for point in points} == {INTERRUPTED}
    assert all(point.phases for point in points)
    assert len(points) == 2
    assert len(stopped.value.result.missing()) == 4
    deadline = time.monotonic() + 20
    while steps() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert steps() == []


def steps():
    """The measuring processes that the cluster's workers started, their keepers, and the one that each forks for a trial."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                command = (place / "cmdline").read_bytes()
                environment = (place / "environ").read_bytes()
            except OSError:
                continue
            if b"flopwise.worker" in command and f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode() in environment:
                found.append(int(place.name))
    return found


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_cluster_elsewhere_is_reached_by_its_address(two_nodes, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS")
    run = flopwise.sweep(plan(trial("steps:out_of_memory"), trial("steps:crashes")), on=two_nodes.client, runs=tmp_path)
    assert [point.status for point in run.points] == [OOM, CRASH]


def test_an_address_where_nothing_listens_is_one_line_at_once(alone, monkeypatch, tmp_path):
    began = time.monotonic()
    with pytest.raises(FlopwiseError, match=r"no Ray cluster answers at ray://127\.0\.0\.1:1: "):
        open_runner("ray://127.0.0.1:1", tmp_path)
    with pytest.raises(FlopwiseError, match="is no address"):
        open_runner("ray://", tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(FlopwiseError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: "):
        open_runner("ray", tmp_path)
    assert time.monotonic() - began < 20


def test_without_ray_there_is_one_line_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FlopwiseError) as missing:
        open_runner("ray", tmp_path)
    assert missing.value.hint == "pip install 'flopwise[ray]'"
