"""A step replayed as a CUDA graph, joined with its capture, is attributed as the same step launched kernel by kernel."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from tests.public_traces import needs_public, public_trace

from flopwise.analysis.explanation import explain_trace
from flopwise.api.explain import explain
from flopwise.errors import FlopwiseError
from flopwise.trace.attribute import attribute
from flopwise.trace.graph_capture import CAPTURE, NAMES, captures_beside, join_replays
from flopwise.trace.read import read_trace

FIXTURE = Path(__file__).parent / "fixtures" / "h200-small-fp32-naive-2steps.kineto.json.gz"
KNOWN = ("op", "top_op", "forward_op", "module", "path", "phase", "class")


@pytest.fixture(scope="module")
def eager():
    """Two steps, kernels alone: their order on the one stream is that of their launches."""
    whole = read_trace(FIXTURE)
    kernels = whole.kernels.join(
        whole.launches.select("process", "correlation"), on=["process", "correlation"], how="semi"
    )
    return replace(whole, kernels=kernels.sort("start_ns"), copies=whole.copies.clear(), source="made")


def launches_of(trace):
    calls = trace.launches.select("correlation", "thread", "name", begun="start_ns", ended="end_ns")
    rows = trace.kernels.select("start_ns", "process", "correlation").join(
        calls, on="correlation", maintain_order="left"
    )
    return rows.select(start_ns="begun", end_ns="ended", process="process", thread="thread", name="name")


def capture_of(trace):
    """The same program while it captures: the host does all of it, nothing runs."""
    return replace(trace, kernels=trace.kernels.clear(), launches=trace.launches.clear(), captured=launches_of(trace))


def replay_of(trace):
    """All kernels from one launch, with nothing of the program around it."""
    launch = trace.launches.head(1).with_columns(correlation=pl.lit(7, pl.Int64))
    nothing = {
        name: getattr(trace, name).clear() for name in ("ops", "ranges", "frames", "syncs", "launches", "sized_ops")
    }
    return replace(
        trace, kernels=trace.kernels.with_columns(correlation=pl.lit(7, pl.Int64)), graph_launches=launch,
        shapes=("",), op_inputs=trace.op_inputs.clear(), inputs=("",), **nothing,
    )  # fmt: skip


def known(trace):
    return attribute(trace).table.select([pl.col(name).cast(pl.String) for name in KNOWN])


def test_a_replay_with_its_capture_is_attributed_as_the_launches_were(eager):
    joined = join_replays(replay_of(eager), capture_of(eager))
    assert (joined.how, joined.share) == (CAPTURE, 1.0)
    assert known(joined.trace).equals(known(eager))
    alone, together = (explain_trace(trace) for trace in (replay_of(eager), joined.trace))
    assert together.gpu_ns == alone.gpu_ns
    assert (together.steps, together.window_ns, together.idle) == (alone.steps, alone.window_ns, alone.idle)


def test_shapes_come_with_the_capture_and_count_once_for_each_replay(eager):
    twice = replay_of(eager)
    later = int(twice.kernels["end_ns"].max()) + 1000
    second = twice.kernels.with_columns(pl.col("start_ns", "end_ns") + later, correlation=pl.lit(8, pl.Int64))
    launch = twice.graph_launches.with_columns(pl.col("start_ns", "end_ns") + later, correlation=pl.lit(8, pl.Int64))
    both = replace(
        twice, kernels=pl.concat([twice.kernels, second]), graph_launches=pl.concat([twice.graph_launches, launch])
    )
    one, two = (explain_trace(join_replays(trace, capture_of(eager)).trace) for trace in (twice, both))
    as_launched = explain_trace(eager)
    assert one.steps * one.attention.matmul_flops == pytest.approx(
        as_launched.steps * as_launched.attention.matmul_flops
    )
    assert two.steps * two.attention.matmul_flops == pytest.approx(2 * one.steps * one.attention.matmul_flops)


def test_a_trace_that_holds_the_capture_needs_no_other(eager):
    replayed = replay_of(eager)
    later = int(eager.ops["end_ns"].max()) + 10**6
    moved = {
        name: getattr(replayed, name).with_columns(pl.col("start_ns", "end_ns") + later)
        for name in ("kernels", "graph_launches")
    }
    both = replace(capture_of(eager), **moved)
    joined = join_replays(both)
    assert joined.share == 1.0
    assert known(joined.trace).equals(known(eager))


def test_another_graphs_capture_is_not_taken(eager):
    shorter = replace(eager, kernels=eager.kernels.head(eager.kernels.height - 5))
    joined = join_replays(replay_of(eager), capture_of(shorter))
    assert (joined.how, joined.share) == ("", 0.0)


def test_without_a_capture_the_same_kernels_launched_singly_tell(eager):
    """A step launched kernel by kernel, and the same as a graph: a server without graphs for some batch sizes."""
    replayed = replay_of(eager)
    later = int(eager.ops["end_ns"].max()) + 10**7
    moved = {
        name: getattr(replayed, name).with_columns(pl.col("start_ns", "end_ns") + later)
        for name in ("kernels", "graph_launches")
    }
    part = moved["kernels"].tail(moved["kernels"].height // 2)
    both = replace(eager, kernels=pl.concat([eager.kernels, part]), graph_launches=moved["graph_launches"])
    joined = join_replays(both)
    assert (joined.how, joined.share) == (NAMES, 1.0)
    tables = [known(joined.trace).tail(part.height), known(eager).tail(part.height)]
    assert tables[0]["op"].equals(tables[1]["op"])


@needs_public
def test_sglangs_decode_has_the_modules_of_the_capture_beside_it():
    replay, capture = (public_trace(name) for name in ("tl_sglang_decode_sglang", "tl_sglang_decode_capture"))
    assert captures_beside(replay, read_trace(replay)) == [capture]
    found = explain(replay)
    assert found.coverage["module"] > 0.99
    assert "joined_graphs" in found.note_keys
    counts = {one.name.rpartition(".")[2]: one.count for one in found.modules}
    assert counts["QKVParallelLinear"] == counts["MergedColumnParallelLinear"] == 36  # layers of Qwen3-8B
    assert explain(replay, capture=capture).modules == found.modules


@needs_public
def test_what_is_no_capture_of_it_is_refused():
    replay, other = (public_trace(name) for name in ("tl_sglang_decode_sglang", "param_dlrm_rank0"))
    with pytest.raises(FlopwiseError, match="is not the capture of the CUDA graphs"):
        explain(replay, capture=other)


def test_a_capture_for_a_trace_without_replays_is_refused_for_that_reason(tmp_path):
    """A past bug: 'its nodes are others: name the capture of this batch size', of a trace that replays nothing."""
    eager = Path(__file__).parent / "fixtures" / "h200-small-fp32-naive-2steps.kineto.json.gz"
    with pytest.raises(FlopwiseError, match="replays no CUDA graph") as refused:
        explain(eager, capture=eager)
    assert refused.value.hint == "omit it"
    with pytest.raises(FlopwiseError, match="there is no such file"):
        explain(eager, capture=tmp_path / "none.json.gz")
