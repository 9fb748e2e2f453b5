"""The planned time of a step keeps to what every cluster keeps to."""

import json
import os
import sys
from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.parallel import layer
from flopwise.predict.parallel.step import model_flops, planned_step
from flopwise.predict.parallel.topology import Group, exchange_s
from flopwise.records import planned as parts
from flopwise.records.ceilings import Tile
from flopwise.spec.cluster import CLUSTERS, cluster
from flopwise.spec.gpu import gpu
from flopwise.spec.layout import Job, Layout
from flopwise.spec.model import preset
from flopwise.spec.planned_model import Experts, PlannedModel
from flopwise.spec.software import SOFTWARE
from flopwise.work.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND_RECEIVE

LLAMA = PlannedModel(spec=preset("llama3-70b"))
MOE = PlannedModel(spec=preset("llama3-8b"), experts=Experts(count=64, chosen=4, d_ff=2048, shared_d_ff=2048))
POWERS = st.sampled_from((1, 2, 4, 8))


def changed(job: Job, **layout: object) -> Job:
    return msgspec.structs.replace(job, layout=msgspec.structs.replace(job.layout, **layout))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    model = draw(st.sampled_from((LLAMA, MOE)))
    tensor, pipeline, context, data = draw(POWERS), draw(POWERS), draw(st.sampled_from((1, 2))), draw(POWERS)
    expert = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= data * tensor])) if model.experts else 1
    virtual = draw(st.sampled_from((1, 2))) if pipeline > 1 else 1
    layout = Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        virtual=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        sequence=tensor > 1,
        sharded=draw(st.sampled_from(("none", "optimizer", "weights"))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        precision=draw(st.sampled_from(("bf16", "fp8"))),
        software=draw(st.sampled_from([one.name for one in SOFTWARE])),
    )
    place = draw(st.sampled_from([one for one in CLUSTERS if "fp8" in _peaks(one.gpu)]))
    return Job(model=model, cluster=place, layout=layout, batch=16 * data, context=4096)


def _peaks(name: str) -> dict[str, float]:
    return gpu(name).peaks


@given(jobs())
def test_parts_add_up_and_none_is_below_zero(job: Job) -> None:
    found = planned_step(job)
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)
    assert set(found.parts) == set(parts.PARTS)
    assert min(found.parts.values()) >= 0
    assert min(found.hidden_s.values(), default=0) >= 0
    assert 0 < found.mfu < 2


@given(jobs(), st.sampled_from((1e7, 1e9, 1e12)))
def test_nothing_hides_behind_more_computing_than_there_is(job: Job, speed: float) -> None:
    slow = msgspec.structs.replace(job.cluster, inside_bytes_s=speed, between_bytes_s=speed)
    found = planned_step(msgspec.structs.replace(job, cluster=slow))
    kernels = sum(found.parts[one] for one in (parts.MATMULS, parts.ATTENTION, parts.PASSES, parts.RECOMPUTED))
    hidden = {name: ns for name, ns in found.hidden_s.items() if name not in (parts.STAGES, parts.CONTEXT)}
    assert hidden.get(parts.TENSOR, 0) + hidden.get(parts.EXPERT, 0) <= kernels * (1 + 1e-9)
    if job.layout.sharded != "weights":
        assert hidden.get(parts.DATA, 0) <= 2 * kernels


@given(jobs().filter(lambda one: one.layout.data > 1))
def test_gradients_in_shards_are_exchanged_with_every_micro_batch(job: Job) -> None:
    once, often = (planned_step(changed(job, sharded=s)) for s in ("optimizer", "gradients"))
    both = [found.parts[parts.DATA] + found.hidden_s.get(parts.DATA, 0) for found in (once, often)]
    assert both[1] >= both[0] * (1 - 1e-9)


@given(jobs())
def test_faster_links_are_never_slower(job: Job) -> None:
    faster = msgspec.structs.replace(
        job.cluster, inside_bytes_s=2 * job.cluster.inside_bytes_s, between_bytes_s=2 * job.cluster.between_bytes_s
    )
    assert planned_step(msgspec.structs.replace(job, cluster=faster)).wall_s <= planned_step(job).wall_s * (1 + 1e-9)


@given(jobs())
def test_recomputing_is_never_faster(job: Job) -> None:
    none, some, full = (planned_step(changed(job, recompute=r)).wall_s for r in ("none", "selective", "full"))
    assert none <= some * (1 + 1e-9)
    assert some <= full * (1 + 1e-9)


@given(jobs())
def test_twice_the_micro_batches_take_at_most_twice_as_long(job: Job) -> None:
    once, twice = (planned_step(msgspec.structs.replace(job, batch=n * job.batch)).wall_s for n in (1, 2))
    assert once < twice <= 2 * once * (1 + 1e-9) + _accumulating(job)


def _accumulating(job: Job) -> float:
    """A single micro-batch has nothing to add its gradients to."""
    return 1.0 if job.micro_batches == 1 else 0.0


@given(jobs().filter(lambda one: one.layout.pipeline > 1))
def test_better_schedules_have_smaller_bubbles(job: Job) -> None:
    plain, chopped, zero = (
        planned_step(changed(job, schedule=s, virtual=v)).parts[parts.BUBBLE]
        for s, v in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))
    )
    assert zero <= plain
    assert chopped <= plain


def test_uneven_experts_cost_time_and_dense_models_have_none() -> None:
    layout = Layout(data=8, expert=8, sharded="optimizer")
    even = Job(model=MOE, cluster=cluster("h100"), layout=layout, batch=64, context=4096)
    uneven = msgspec.structs.replace(even, uneven=1.5)
    assert planned_step(uneven).parts[parts.IMBALANCE] > 0 == planned_step(even).parts[parts.IMBALANCE]
    assert planned_step(uneven).wall_s > planned_step(even).wall_s


def test_a_calibrated_gpu_is_planned_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model=LLAMA, cluster=cluster("h100"), layout=Layout(data=64, sharded="weights"), batch=64, context=4096)
    stated = planned_step(job)
    slow = from_datasheet(gpu("h100"))
    halves = {
        name: msgspec.structs.replace(one, tiles=tuple(map(_half, one.tiles))) for name, one in slow.matmul.items()
    }
    measured = msgspec.structs.replace(slow, how="measured", matmul=halves)
    monkeypatch.setattr(layer, "load_ceilings", lambda name: measured)
    try:
        _forget()
        found = planned_step(job)
    finally:
        _forget()
    assert (stated.how, found.how) == ("specified", "measured")
    assert found.parts[parts.MATMULS] > 1.5 * stated.parts[parts.MATMULS]


def _half(one: Tile) -> Tile:
    return msgspec.structs.replace(one, flops_per_s=one.flops_per_s / 2)


def _forget() -> None:
    for known in (layer.limits, layer._product_s, layer.attention_block, layer.mlp_block, layer.head_block):
        known.cache_clear()


@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND_RECEIVE])
def test_more_bytes_and_longer_ways_take_longer(kind: str) -> None:
    place = cluster("h100")
    near, far = ([exchange_s(kind, n, Group(8, stride), place) for n in (1e3, 1e6, 1e9)] for stride in (1, 8))
    assert near == sorted(near)
    assert all(a < b for a, b in zip(near, far, strict=True))
    assert exchange_s(kind, 1e9, Group(1), place) == 0


def test_a_spine_is_narrow_only_for_groups_that_cross_it_often() -> None:
    meta, plain = cluster("grand-teton"), msgspec.structs.replace(cluster("grand-teton"), oversubscribed=1.0)
    near, far = Group(256, 64), Group(16, 1024)
    assert exchange_s(ALL_REDUCE, 1e9, near, meta) == exchange_s(ALL_REDUCE, 1e9, near, plain)
    assert exchange_s(ALL_REDUCE, 1e9, far, meta) > exchange_s(ALL_REDUCE, 1e9, far, plain)


def test_flops_are_six_for_a_weight_and_token() -> None:
    from flopwise.predict.flops import model_flops as counted

    spec = preset("llama3-8b")
    assert model_flops(PlannedModel(spec=spec), 4, 2048) == pytest.approx(counted(spec, 4, 2048).total, rel=1e-3)


def test_llama3_405b_on_16384_gpus_is_near_what_meta_published() -> None:
    """Table 4 of arXiv 2407.21783: TP 8, PP 16, DP 128, batches of 16M tokens: 400 TFLOP/s, 41 % MFU."""
    layout = Layout(
        data=128, tensor=8, pipeline=16, virtual=2, schedule="interleaved", sequence=True, sharded="optimizer"
    )
    job = Job(
        model=PlannedModel(spec=preset("llama3-405b")),
        cluster=cluster("grand-teton"),
        layout=layout,
        batch=2048,
        context=8192,
    )
    assert 0.36 < planned_step(job).mfu < 0.46


ROWS = os.environ.get("FLOPWISE_PLAN_ROWS")


@pytest.mark.skipif(not ROWS, reason="FLOPWISE_PLAN_ROWS names the folder with published.jsonl")
def test_held_out_rows_are_as_near_as_the_docs_say() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import plan_accuracy

    for name, aim in (("published", 0.10), ("a100-single-node", 0.12)):
        rows = [json.loads(line) for line in (Path(str(ROWS)) / f"{name}.jsonl").read_text().splitlines()]
        apart = [row for row, kept in zip(rows, plan_accuracy.held_out(rows), strict=True) if kept]
        assert len(apart) > len(rows) / 3
        assert median(plan_accuracy.errors(apart, plan_accuracy.planned(apart))) < aim
