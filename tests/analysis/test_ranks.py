"""Ranks of a job together: what is planted is found, what should add up does, and what does not belong is left out."""

import gzip
import json
import shutil

import polars as pl
import pytest
from tests.public_traces import FILES, needs_public
from tests.rank_traces import CASES, CAUSES, Job, offsets, write

from flopwise.analysis.ranks.clocks import aligned_clocks
from flopwise.analysis.ranks.explained import explain_ranks, read_ranks
from flopwise.analysis.ranks.matching import matched
from flopwise.analysis.ranks.selection import NotTogether
from flopwise.analysis.ranks.waiting import analysed_steps, parts_of_steps, waits
from flopwise.analysis.reading import traces_in
from flopwise.spec.links import links


def changed(path, change):
    """A file with another content."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    change(content)
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_what_is_planted_is_found_to_the_nanosecond(case, tmp_path):
    job = Job(case=case)
    made = write(job, tmp_path)
    found = explain_ranks(traces_in(tmp_path))
    if case in CAUSES:
        assert (found.straggler.rank, found.straggler.cause) == (job.straggler, CAUSES[case])
        assert found.straggler.saving_ns == pytest.approx(made.step_saving_ns(), abs=2)
    else:
        assert found.straggler is None
    assert found.missing == ((job.straggler,) if case == "missing" else ())


def test_clocks_are_recovered(tmp_path):
    job = Job(case="host", offset_ns=7_000_000, seed=4)
    write(job, tmp_path)
    found, ahead = explain_ranks(traces_in(tmp_path)), offsets(job)
    assert [one.clock_ahead_ns for one in found.ranks] == [one - ahead[0] for one in ahead]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", ["clock", "input"])
def test_waiting_and_transfer_are_the_collective_and_the_parts_are_the_step(named, case, tmp_path):
    write(Job(case=case, named=named, inner=1, outer=1), tmp_path)
    ranks = read_ranks(traces_in(tmp_path))
    both = matched(ranks)
    found = waits(ranks, both, aligned_clocks(both, len(ranks)), analysed_steps(ranks))
    rows = found.rows
    assert rows["matched"].all()
    assert (rows["waiting_ns"] + rows["transfer_ns"] == rows["end_ns"] - rows["start_ns"]).all()
    assert rows.filter(pl.col("waiting_ns") < 0).height == 0
    for rank in found.ranks:
        assert parts_of_steps(rank).sum() == (rank.edges[:, 1] - rank.edges[:, 0]).mean()
    told = explain_ranks(traces_in(tmp_path))
    for one in told.ranks:
        parts = (one.compute_ns, one.transfer_ns, one.waiting_ns, one.input_ns, one.idle_ns)
        assert sum(parts) == pytest.approx(one.step_ns)
    assert (told.straggler.rank, told.straggler.cause) == (5, CAUSES[case])


def test_processes_of_their_own_find_the_same(tmp_path):
    write(Job(case="clock"), tmp_path)
    files = traces_in(tmp_path)
    assert explain_ranks(files, processes=2) == explain_ranks(files, processes=1)


def test_what_does_not_belong_is_said_and_the_rest_explained(tmp_path):
    write(Job(case="host"), tmp_path)
    whole = (tmp_path / "rank1.json.gz").read_bytes()
    (tmp_path / "rank1.json.gz").write_bytes(whole[: len(whole) // 2])
    shutil.copy(tmp_path / "rank2.json.gz", tmp_path / "rank2-copy.json.gz")
    changed(tmp_path / "rank3.json.gz", lambda trace: trace["distributedInfo"].update(world_size=16))

    def an_hour_later(trace):
        trace["baseTimeNanoseconds"] += 3600 * 10**9

    def later_steps(trace):
        for event in trace["traceEvents"]:
            event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#9")

    changed(tmp_path / "rank4.json.gz", an_hour_later)
    changed(tmp_path / "rank6.json.gz", later_steps)
    (tmp_path / "rank8.json").write_text('{"a": 1}')
    found = explain_ranks(traces_in(tmp_path))
    assert [one.rank for one in found.ranks] == [0, 2, 5, 7]
    assert found.missing == (1, 3, 4, 6)
    told = dict(zip(found.note_keys, found.notes, strict=True))
    assert {"unreadable", "other_run", "twice", "other_steps", "missing"} <= set(told)
    text = "\n".join(found.notes)
    for words in (
        "rank1.json.gz is truncated",
        "rank8.json is JSON but not a trace",
        "rank2-copy.json.gz is left out",
        "rank3.json.gz is of a job of 16 ranks, not 8",
        "rank4.json.gz was traced at another time",
        "rank 6 was traced in ProfilerStep#95",
    ):
        assert words in text
    assert all("\n" not in note and str(tmp_path) not in note for note in found.notes)
    assert (found.straggler.rank, found.straggler.cause) == (5, "host late")


def test_traces_that_have_nothing_in_common_are_refused(tmp_path):
    write(Job(ranks=2, inner=1, outer=1), tmp_path)

    def alone(trace):
        trace["traceEvents"] = [e for e in trace["traceEvents"] if not e["name"].startswith("nccl")]

    for file in traces_in(tmp_path):
        changed(file, alone)
    with pytest.raises(NotTogether, match="fewer than two"):
        explain_ranks(traces_in(tmp_path))


def test_a_call_of_another_kind_on_one_rank_is_not_matched(tmp_path):
    write(Job(inner=1, outer=1), tmp_path)

    def other(trace):
        last = [e for e in trace["traceEvents"] if e["args"].get("Collective name") == "allreduce"][-1]
        last["args"]["Collective name"] = "broadcast"

    changed(tmp_path / "rank3.json.gz", other)
    found = explain_ranks(traces_in(tmp_path))
    assert "odd" in found.note_keys
    assert found.unmatched == len(found.ranks)


def test_groups_called_in_another_order_are_reported(tmp_path):
    write(Job(), tmp_path)
    assert explain_ranks(traces_in(tmp_path)).late_groups == ()

    def swapped(trace):
        """The collectives across hosts are launched before those within, on one rank of a group that shares two."""
        for event in trace["traceEvents"]:
            if event["args"].get("Process Group Name", "").startswith("inner"):
                event["args"]["Process Group Name"] = "world2"
                event["args"]["Process Group Ranks"] = "[0, 1, 2, 3, 4, 5, 6, 7]"

    for file in traces_in(tmp_path):
        changed(file, swapped)

    def early(trace):
        calls = {e["args"].get("correlation"): e for e in trace["traceEvents"] if e["cat"] == "cuda_runtime"}
        for event in trace["traceEvents"]:
            if event["args"].get("Process Group Name") == "world" and event["args"]["Collective name"] == "allreduce":
                calls[event["args"]["correlation"]]["ts"] -= 25

    changed(tmp_path / "rank3.json.gz", early)
    found = explain_ranks(traces_in(tmp_path)).late_groups
    assert set(found) == {"world", "world2", "outer1"}  # each shares rank 3 and another with 'world'


def test_bandwidth_is_that_of_the_transfer_beside_the_link(tmp_path):
    write(Job(case="clock"), tmp_path)
    found = explain_ranks(traces_in(tmp_path), link=links("nvlink4,ib400"))
    world = next(one for one in found.groups if one.group == "world" and one.kind == "all-reduce")
    assert world.bus_bytes_s == pytest.approx((64 << 20) / 300e-6 * 2 * 7 / 8)
    assert (world.across_hosts, world.link_bytes_s) == (True, 50e9)
    inner = next(one for one in found.groups if one.group == "inner0")
    assert (inner.across_hosts, inner.link_bytes_s) == (False, 450e9)


@needs_public
def test_eight_ranks_of_a_recommender_wait_for_rank_7():
    files = [path for path in FILES if path.name.startswith("param_dlrm_rank")]
    if len(files) < 8:
        pytest.skip("not all ranks are here")
    found = explain_ranks(files)
    assert (found.straggler.rank, found.straggler.last, found.straggler.collectives) == (7, 5, 8)
    assert [one.last for one in found.ranks] == [0, 0, 0, 0, 1, 2, 0, 5]
    first = found.collectives[0]
    assert (first.last_rank, first.kind, first.bytes) == (7, "all-to-all", 24576)
    assert first.longest_waiting_ns == pytest.approx(7.625e6, rel=0.001)  # rank 1: 7,635 µs, of which 10 are transfer
    assert max(abs(one.clock_ahead_ns) for one in found.ranks) < 5_000  # one host, one clock
    # Without rank 7 the next to last arrive 505, 509, 162 and 124 µs earlier; the fifth is its own clock's resolution.
    assert found.straggler.saving_ns == pytest.approx(1.30e6, rel=0.01)


def test_collectives_that_the_host_makes_for_a_gpu_are_found(tmp_path):
    """Gloo has no kernels: its ranges are on threads of its own, and name no group."""
    write(Job(case="work"), tmp_path)

    def of_all(content):
        content["traceEvents"] = [
            one
            for one in content["traceEvents"]
            if one.get("args", {}).get("Group size", 8) == 8 and "SendRecv" not in one.get("name", "")
        ]

    def by_gloo(content):
        events = content["traceEvents"]
        host = next(one["pid"] for one in events if one.get("cat") == "cuda_runtime")
        for event in [one for one in events if "nccl" in one.get("name", "").lower()]:
            event |= {"name": "gloo:all_reduce", "cat": "user_annotation", "pid": host, "tid": 99, "args": {}}
        content["distributedInfo"]["pg_config"] = [{"pg_name": "0", "ranks": list(range(8))}]

    found = []
    for change in (of_all, by_gloo):
        for path in traces_in(tmp_path):
            changed(path, change)
        found.append(explain_ranks(traces_in(tmp_path)))
    assert found[0].collectives_found == found[1].collectives_found > 0
    waited = [sum(one.waiting_ns for one in explained.groups) for explained in found]
    assert waited[1] == pytest.approx(waited[0], rel=0.01)
    assert waited[0] > 0
