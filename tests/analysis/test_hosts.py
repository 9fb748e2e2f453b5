"""Points of several machines are named as such: in a run's tables, on its screen, and in a comparison."""

import msgspec
import pytest

from flopwise.analysis.hosts import different_environments, different_hosts, several_environments, several_hosts
from flopwise.analysis.matching import Compared, compare_points
from flopwise.records.run import Environment, Gpu, PhaseTimes, Point, RunHeader
from flopwise.render.comparison_view import comparison_view
from flopwise.render.run_view import run_view
from flopwise.render.views import text_of
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import StoredRun


def point(host, batch=1, ns=1_000_000, gpu=None):
    trial = Trial(workload=workload("tiny", batch=batch), sampling=Sampling(), device="cpu")
    there = Environment(flopwise="1", python="3", torch="2", cpu="one", host=host, gpu=gpu)
    times = (PhaseTimes(phase="step", wall_ns=tuple(ns + i for i in range(20))),)
    return Point(key=trial.key(), trial=trial, status="ok", phases=times, environment=there)


def stored(tmp_path, *points):
    header = RunHeader(id="r", kind="sweep", created_at="", created_ns=0, trials=tuple(p.trial for p in points))
    return StoredRun(path=tmp_path / "r", header=header, points=points)


H100 = Gpu(name="NVIDIA H100", memory_bytes=1, sm_count=1, l2_bytes=1, capability="9.0", driver="570.1")


def test_several_hosts_are_named_with_their_gpu_and_driver():
    said = several_hosts([point("n2", 1), point("n1", 2, gpu=H100), point("n2", 3)])
    assert said.startswith("points come from 2 hosts: n1 (1 point, NVIDIA H100, driver 570.1), n2 (2 points)")
    assert several_hosts([point("n1", 1), point("n1", 2)]) == ""
    assert several_hosts([point("", 1), point("", 2)]) == ""
    assert "6 hosts" in (many := several_hosts([point(f"n{n}", n + 1) for n in range(6)]))
    assert "and 2 more" in many


@pytest.mark.parametrize("hosts", [("n1", "n1", "n2"), ("n1", "n1", "n1")])
def test_a_run_says_so_in_its_tables_and_on_its_screen(tmp_path, hosts):
    run = stored(tmp_path, *(point(name, n + 1) for n, name in enumerate(hosts)))
    (table,) = run_view(run).tables
    several = len(set(hosts)) > 1
    assert any("2 hosts" in note for note in table.notes) == several
    assert ("host" in [column.key for column in table.columns]) == several
    assert ("2 hosts" in text_of(run)) == several
    assert [row["environment"].host for row in run_view(run).document["points"]] == list(hosts)


@pytest.mark.parametrize(
    ("a", "b", "said"), [("n1", "n2", True), ("n1", "n1", False), ("", "n1", True), ("", "", False)]
)
def test_a_comparison_across_hosts_says_so(a, b, said):
    pair = point(a), point(b, ns=900_000)
    (table,) = comparison_view(Compared(((*pair, compare_points(*pair)),))).tables
    assert any("different hosts" in note for note in table.notes) == said
    assert bool(different_hosts([pair])) == said


def test_an_old_row_without_a_host_reads_as_the_machine_itself():
    row = msgspec.json.encode(point("n1")).replace(b',"host":"n1"', b"")
    assert msgspec.json.decode(row, type=Point).environment.host == ""


@pytest.mark.parametrize("change", [{"torch": "3"}, {"cpu": "another"}, {"gpu": H100}])
def test_another_environment_is_named_in_a_run_and_in_a_comparison(tmp_path, change):
    one, two, same = point(""), point("", batch=2), point("", batch=3)
    there = msgspec.structs.replace(two.environment, **change)
    two = msgspec.structs.replace(two, environment=there)
    assert several_environments([one, same]) == different_environments([(one, same)]) == ""
    assert "measured with 2 environments" in several_environments([one, two, same])
    (table, *_) = run_view(stored(tmp_path, one, two, same)).tables
    assert "environment" in [column.key for column in table.columns]
    assert "measured with 2 environments" in " ".join(text_of(stored(tmp_path, one, two, same)).split())
    compared = Compared(((one, two, compare_points(one, two)),))
    assert any("different environments" in note for note in comparison_view(compared).document["notes"])
