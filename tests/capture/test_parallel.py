"""Steps that several ranks share, over Gloo on the CPU: every way gives what one process gives, and every verb takes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import flopwise
from flopwise.errors import Failed, FlopwiseError
from flopwise.records.events import Done
from flopwise.records.run import CRASH, ERROR, OK
from flopwise.spec.recipe import CHOICES
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.worker import torchrun

SIZES = {"batch": 4, "context": 16, "device": "cpu"}


def law(ranks, folder):
    script = Path(__file__).with_name("parallel_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    for _ in range(2):  # on a busy machine ranks may miss each other when they start: once more
        done = subprocess.run([*command, str(script), str(folder)], check=False, timeout=500, capture_output=True)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr[-4000:].decode(errors="replace")
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_way_gives_what_one_process_gives(ranks, tmp_path):
    found = law(ranks, tmp_path)
    ways = CHOICES["parallel"][1:]
    assert len({name.partition(":")[0] for name in found}) == len(ways) - (2 if ranks == 3 else 0)
    for name, (alone, shared) in found.items():
        assert shared == pytest.approx(alone, rel=2e-5), name
        assert alone[-1] != pytest.approx(alone[0], rel=1e-4), "nothing was learnt: the law would hold of anything"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["zero1", "fsdp2", "tp", "fsdp2+tp", "pp", "own-fsdp"])
def test_bench_takes_every_way(way, tmp_path):
    run = flopwise.bench(
        "tiny", parallel=way, ranks=2, samples=2, warmup=1, runs=tmp_path, set={"tied": False}, **SIZES
    )
    assert run.points[0].status == OK
    assert len(run.points[0].ranks) == 2


@pytest.mark.slow
def test_bench_has_a_row_of_every_rank(tmp_path):
    run = flopwise.bench("tiny", parallel="ddp", ranks=2, samples=3, warmup=1, runs=tmp_path, **SIZES)
    point = run.points[0]
    assert [row.rank for row in point.ranks] == [0, 1]
    assert all(len(row.wall_ns) == 3 and row.peak_rss_bytes for row in point.ranks)
    slowest = tuple(max(each) for each in zip(*(row.wall_ns for row in point.ranks), strict=True))
    assert point.phases[0].wall_ns == slowest


@pytest.mark.slow
def test_profile_writes_a_trace_of_every_rank(tmp_path):
    flopwise.profile("tiny", parallel="fsdp2", ranks=2, runs=tmp_path, **SIZES)
    traces = sorted(path.name for path in tmp_path.glob("*/traces/*"))
    assert len(traces) == 2
    assert sum("-rank1" in name for name in traces) == 1
    together = flopwise.explain("last", runs=tmp_path)
    assert len(together.ranks) == 2


@pytest.mark.slow
def test_memory_of_a_rank_is_predicted_and_measured(tmp_path):
    peaks = {}
    for way in ("ddp", "zero1", "own-zero1"):
        found = flopwise.memory("tiny", parallel=way, ranks=2, runs=tmp_path, **SIZES)
        peaks[way] = found.devices[0].peak.owners["optimizer state"]
    assert peaks["zero1"] == pytest.approx(peaks["ddp"] / 2, rel=0.1)
    assert peaks["own-zero1"] == pytest.approx(peaks["ddp"] / 2, rel=0.1)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path):
    with pytest.raises(Failed) as failed:
        flopwise.bench("tiny", parallel="ddp", ranks=2, runs=tmp_path, **(SIZES | {"context": 10_000_000}))
    assert failed.value.result.points[0].status == "oom"


REFUSED = {
    "needs a way": {"ranks": 2},
    "does not divide among 3 ranks": {"parallel": "ddp", "ranks": 3, "batch": 4},
    "n_heads = 4 does not divide": {"parallel": "tp", "ranks": 3},
    "as many layers": {"parallel": "pp", "ranks": 64, "batch": 64},
    "even number": {"parallel": "fsdp2+tp", "ranks": 3},
    "graph = 'on'": {"parallel": "ddp", "graph": "on"},
    "optimizer = 'flopwise'": {"parallel": "fsdp2", "optimizer": "flopwise"},
    "loss = 'fused'": {"parallel": "tp", "ranks": 2, "loss": "fused"},
    "is for training": {"parallel": "ddp", "phase": "forward"},
    "ranks = 0": {"parallel": "ddp", "ranks": 0},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused_by_name(said):
    with pytest.raises(FlopwiseError, match=said):
        workload("tiny", **REFUSED[said])


def test_a_step_of_one_process_keeps_its_key():
    assert Trial(workload=workload("small", precision="bf16"), sampling=Sampling()).key() == "0f1efaec5be2a63f"


def test_a_rank_that_lost_its_neighbour_is_not_the_reason():
    lost = Done(status=ERROR, reason="RuntimeError: gloo: Connection reset by peer")
    own = Done(status=ERROR, reason="ValueError: too many heads")
    assert (torchrun._left_alone(lost).status, torchrun._left_alone(own)) == (CRASH, own)
    assert lost.reason in torchrun._left_alone(lost).reason
