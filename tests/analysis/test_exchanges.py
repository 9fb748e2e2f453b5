"""Measured collectives: bandwidths as NCCL's tests define them, and the model that a run's sizes give."""

import pytest

from flopwise.analysis.exchanges import exchange, link_fits, measured_cluster, measured_times
from flopwise.errors import FlopwiseError
from flopwise.predict.collectives import collective_time
from flopwise.predict.parallel.topology import Group, exchange_s
from flopwise.records.run import STEP, PhaseTimes, Point, Ran
from flopwise.spec.cluster import cluster
from flopwise.spec.workload import Sampling, Trial, workload

SIZES = (1_000, 100_000, 10_000_000)


def point(name="all-reduce", n_bytes=10**9, ns=10**7, ranks=4, backend="gloo", device="cpu", status="ok", **options):
    trial = Trial(workload=workload(f"op:{name}", set={"bytes": n_bytes}, ranks=ranks, **options), sampling=Sampling())
    times = PhaseTimes(phase=STEP, wall_ns=(round(ns),) * 8)
    ran = Ran(device=device, backend=backend)
    return Point(key=trial.key(), trial=trial, status=status, phases=(times,), ran=ran)


@pytest.mark.parametrize(
    ("name", "bus"),
    [("all-reduce", 150), ("all-gather", 75), ("reduce-scatter", 75), ("all-to-all", 75), ("send-recv", 100)],
)
def test_bandwidths_are_those_of_nccl_tests(name, bus):
    found = exchange(point(name))
    assert found.algorithm_bytes_per_s == pytest.approx(100e9)
    assert found.bus_bytes_per_s == pytest.approx(bus * 1e9)


def test_bandwidth_is_of_the_bytes_that_were_sent():
    assert exchange(point("all-gather", n_bytes=1_000_000, ranks=6)).message_bytes == 999_984
    assert exchange(point("all-gather", n_bytes=1_000_000, ranks=6, precision="bf16")).message_bytes == 999_996


def test_other_steps_exchange_nothing():
    trial = Trial(workload=workload("op:gelu"), sampling=Sampling())
    times = PhaseTimes(phase=STEP, wall_ns=(5,) * 8)
    assert exchange(Point(key="", trial=trial, status="ok", phases=(times,), ran=Ran(device="cpu"))) is None


def measured(name, latency_ns, bytes_s, ranks=2, **where):
    return [point(name, n, latency_ns + 1e9 * n / bytes_s, ranks, **where) for n in SIZES]


def test_each_backend_kind_and_number_of_ranks_has_its_own_line():
    points = measured("all-reduce", 50_000, 1e9) + measured("all-reduce", 90_000, 1e9, ranks=4)
    points += measured("send-recv", 20_000, 2e9) + measured("all-reduce", 8_000, 1e11, backend="nccl", device="cuda:0")
    found = {(f.backend, f.device, f.time.kind, f.time.ranks): f.time for f in link_fits(points)}
    assert found["gloo", "cpu", "all-reduce", 2].latency_ns == pytest.approx(50_000, rel=1e-3)
    assert found["gloo", "cpu", "all-reduce", 4].bus_bytes_s == pytest.approx(1.5e9, rel=1e-3)
    assert found["gloo", "cpu", "send and receive", 2].latency_ns == pytest.approx(20_000, rel=1e-3)
    assert found["nccl", "cuda", "all-reduce", 2].bus_bytes_s == pytest.approx(1e11, rel=1e-3)
    assert len(found) == 4


def test_one_size_gives_no_line_and_a_failed_point_counts_for_none():
    assert link_fits([point(n_bytes=n, status="interrupted") for n in SIZES]) == ()
    assert link_fits([point()] * 3) == ()


def test_a_line_through_two_sizes_has_no_error_to_tell():
    assert link_fits(measured("all-reduce", 50_000, 1e9))[0].error == pytest.approx(0, abs=1e-3)
    assert link_fits(measured("all-reduce", 50_000, 1e9)[:2])[0].error is None


def test_a_prediction_takes_the_links_between_gpus_and_one_backend():
    points = measured("all-reduce", 50_000, 1e9)
    points += measured("all-reduce", 70_000, 1e10, device="cuda:0")
    points += measured("all-reduce", 8_000, 1e11, backend="nccl", device="cuda:0")
    eight = collective_time(measured_times(points), "all-reduce", 8)
    assert eight.bus_bytes_s == pytest.approx(1e11, rel=1e-3)
    assert [one.latency_ns for one in measured_times(points, "gloo")] == [pytest.approx(70_000, rel=1e-2)]
    assert measured_times([]) == ()


def test_a_cluster_takes_the_links_of_a_run_of_gpus():
    points = measured("all-reduce", 50_000, 1e9, ranks=8)
    points += measured("all-reduce", 8_000, 1e11, ranks=8, backend="nccl", device="cuda:0")
    mine = measured_cluster(cluster("dgx-h100"), points)
    assert exchange_s("all-reduce", 1e10, Group(8), mine) == pytest.approx(0.1, rel=1e-3)
    with pytest.raises(FlopwiseError, match="no collective of GPUs"):
        measured_cluster(cluster("dgx-h100"), measured("all-reduce", 50_000, 1e9))
