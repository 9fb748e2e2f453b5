"""Slurm by way of submitit, with Slurm's commands played by scripts: no Slurm is needed, and none was."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from played_slurm import PlayedSlurm

import flopwise
from flopwise.capture.progress import Progress
from flopwise.capture.runners import open_runner, slurm
from flopwise.capture.runners.cluster import ClusterRunner, trial_job
from flopwise.capture.runners.node_side import Folder
from flopwise.capture.runners.nodes import Share
from flopwise.errors import FlopwiseError
from flopwise.records.run import CRASH, LOST, OK, OOM, TIMEOUT
from flopwise.spec.sweep import Sweep
from flopwise.store import list_runs

pytest.importorskip("submitit", reason="submitit is not installed: pip install 'flopwise[slurm]'")

STEPS = Path(__file__).parents[1]
SOURCE = Path(flopwise.__file__).parents[1]
NODES = "32|gpu:a100:4(S:0-1)|mixed\n64|(null)|idle\n"


@pytest.fixture
def played(tmp_path, monkeypatch):
    made = PlayedSlurm(tmp_path / "slurm", "2|(null)|idle\n")
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SOURCE), str(STEPS))))
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    monkeypatch.setattr(slurm, "ASK_S", 0.2)
    yield made
    for pid in made.running():
        os.killpg(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_sweep_on_slurm_has_the_rows_of_one_here(played, tmp_path, own_step):
    trials = [own_step("matmul"), own_step("crashes")]
    folder = Folder(tmp_path)
    with open_runner("slurm", tmp_path / "runs") as runner:
        runner.check(trials)
        points = {point.key: point for point in runner.measure(trials, folder, Progress(), lambda trial: None)}
    assert [points[trial.key()].status for trial in trials] == [OK, CRASH]
    assert len(points[trials[0].key()].times().wall_ns) == 3
    assert points[trials[0].key()].environment.host
    assert list((tmp_path / "runs").iterdir()) == []  # submitit's files are gone
    assert len(played.jobs()) == 2


def batch_file(played, given, tmp_path, own_step):
    """What sbatch is given for one trial with such a share."""
    (played.state / "refuse").write_text("sbatch: error: seen\n")
    cluster = slurm.SlurmCluster(tmp_path)
    with pytest.raises(FlopwiseError, match="sbatch refuses the job: sbatch: error: seen") as refused:
        cluster.submit(trial_job(own_step("matmul")), given)
    assert "SBATCH_PARTITION" in refused.value.hint
    asked = {line.removeprefix("#SBATCH ") for line in played.jobs()[-1].splitlines() if line.startswith("#SBATCH")}
    return {line for line in asked if not line.startswith(("--output", "--error"))}  # paths, which may hold any word


def test_one_gpu_is_asked_for_with_its_cpus_and_its_time(played, tmp_path, own_step):
    asked = batch_file(played, Share(cpus=8, gpus=1, minutes=21), tmp_path, own_step)
    assert {
        "--gpus-per-node=1",
        "--cpus-per-task=8",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--time=21",
        "--job-name=flopwise",
    } <= asked
    assert not any("exclusive" in line for line in asked)


def test_a_whole_node_is_asked_for_alone(played, tmp_path, own_step):
    asked = batch_file(played, Share(cpus=64, gpus=4, whole=True), tmp_path, own_step)
    assert {"--exclusive", "--mem=0", "--gpus-per-node=4", "--cpus-per-task=64"} <= asked
    asked = batch_file(played, Share(cpus=64, whole=True), tmp_path, own_step)
    assert not any("gpu" in line for line in asked)


def test_nodes_are_those_of_the_partition_that_sbatch_will_use(played, tmp_path, monkeypatch, own_step):
    (played.state / "nodes").write_text(NODES)
    runner = ClusterRunner(slurm.SlurmCluster(tmp_path))
    assert [(node.cpus, node.gpus) for node in runner.cluster.nodes()] == [(32, 4), (64, 0)]
    monkeypatch.setenv("SBATCH_PARTITION", "big")
    runner.cluster.nodes()
    assert (played.state / "sinfo-asked").read_text().endswith("-p big\n")
    (played.state / "nodes").write_text("64|(null)|idle\n")
    with pytest.raises(FlopwiseError, match="can never run this: it needs a GPU"):
        runner.check([msgspec.structs.replace(own_step("matmul"), device="cuda")])


@pytest.mark.parametrize(
    ("state", "status"),
    [("OUT_OF_MEMORY", OOM), ("TIMEOUT", TIMEOUT), ("NODE_FAIL", LOST), ("PREEMPTED", LOST), ("COMPLETED", LOST)],
)
def test_what_slurm_says_of_a_job_without_result_is_its_row(played, tmp_path, own_step, monkeypatch, state, status):
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 0)
    (played.bin / "srun").write_text("#!/bin/bash\nexit 1\n")
    for n in range(9):
        (played.state / f"state-{played.first + n}").write_text(state)
    with open_runner("slurm", tmp_path / "runs") as runner:
        (point,) = runner.measure([own_step("matmul")], Folder(tmp_path), Progress(), lambda trial: None)
    assert point.status == status
    assert len(played.jobs()) == (3 if status == LOST else 1)
    assert point.reason.endswith(("memory than its job may", "took too long", "3 times"))


def test_ctrl_c_takes_the_jobs_back(played, tmp_path, own_step):
    plan = Sweep(name="s", trials=(own_step("hangs", timeout_s=500.0), own_step("hangs_deaf", timeout_s=500.0)))

    def interrupt():
        while len(played.running()) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        flopwise.sweep(plan, on="slurm", runs=tmp_path / "runs")
    assert list_runs(tmp_path / "runs") == []  # of a run without rows nothing stays
    deadline = time.monotonic() + 10
    while played.running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert played.running() == []


def test_without_sbatch_and_without_submitit_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FlopwiseError, match="there is no sbatch here"):
        open_runner("slurm", tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(FlopwiseError) as missing:
        open_runner("slurm", tmp_path)
    assert missing.value.hint == "pip install 'flopwise[slurm]'"
