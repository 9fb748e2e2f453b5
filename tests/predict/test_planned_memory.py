"""Laws of a plan's memory: owners add up, sharing never costs, and what is known elsewhere is met."""

import msgspec
import pytest

from flopwise.predict.parallel.activations import Ranks, layer_bytes
from flopwise.predict.parallel.memory import FRAGMENTS, OUTSIDE, planned_memory
from flopwise.predict.prediction import peak_bytes
from flopwise.spec.cluster import cluster
from flopwise.spec.gpu import gpu
from flopwise.spec.layout import SHARDED, Job, Layout
from flopwise.spec.model import ModelSpec, preset
from flopwise.spec.planned_model import Experts, Latent, PlannedModel
from flopwise.spec.software import SOFTWARE, software
from flopwise.spec.workload import workload
from flopwise.work.operation import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER_STATE, PARAMETERS, SCORES

GPT = ModelSpec(
    name="gpt", d_model=1024, d_ff=4096, n_layers=8, n_heads=16, vocab=51_200, mlp="gelu",
    norm_kind="layer", positions="learned", max_context=2048, tied=True,
)  # fmt: skip
MIXTURE = PlannedModel(
    spec=preset("llama3-8b"), experts=Experts(count=64, chosen=4, d_ff=2048, shared_d_ff=2048, dense_layers=2)
)
DENSE = PlannedModel(spec=preset("llama3-70b"))
LATENT = msgspec.structs.replace(
    MIXTURE, latent=Latent(q_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
)
SMALL_PYTORCH = [
    ("small", 8, 1024), ("large", 8, 1024), ("large", 4, 512), ("2.7B", 8, 512),
    ("gpt2-xl", 16, 1024), ("llama3.2-1b", 8, 2048),
]  # fmt: skip


def planned(model, batch=64, length=4096, **layout):
    return planned_memory(
        Job(model=model, cluster=cluster("h100"), layout=Layout(**layout), batch=batch, context=length)
    )


def tensors(found):
    """What PyTorch counts as allocated."""
    return sum(size for name, size in found.owners.items() if name not in (*OUTSIDE, FRAGMENTS))


@pytest.mark.parametrize("program", [one.name for one in SOFTWARE])
@pytest.mark.parametrize("sharded", SHARDED)
@pytest.mark.parametrize("model", [DENSE, MIXTURE, LATENT], ids=["dense", "experts", "latent"])
def test_owners_add_up_and_none_is_below_zero(model, sharded, program):
    found = planned(model, data=8, tensor=2, pipeline=4, sequence=True, sharded=sharded, software=program, length=2048)
    assert found.peak_bytes == sum(found.owners.values())
    assert min(found.owners.values()) > 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("program", ["megatron", "torchtitan", "pytorch", "megatron-2021"])
def test_more_tensor_ranks_never_take_more(program, recompute):
    sizes = [
        tensors(
            planned(
                DENSE, tensor=ranks, data=4, sequence=True, software=program, recompute=recompute, sharded="weights"
            )
        )
        for ranks in (1, 2, 4, 8)
    ]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("program", [one.name for one in SOFTWARE])
@pytest.mark.parametrize("model", [DENSE, MIXTURE, LATENT], ids=["dense", "experts", "latent"])
@pytest.mark.parametrize("pipeline", [1, 2, 8])
def test_more_recomputation_never_takes_more(model, program, pipeline):
    none, selective, full = (
        planned(
            model, pipeline=pipeline, data=8, micro_batch=8, sharded="weights", software=program, recompute=how
        ).peak_bytes
        for how in ("none", "selective", "full")
    )
    assert full <= selective <= none
    assert full < none


@pytest.mark.parametrize("program", ["megatron", "torchtitan", "pytorch"])
@pytest.mark.parametrize("data", [4, 16, 64])
def test_sharding_more_never_takes_more(program, data):
    none, optimizer, gradients, weights = (
        planned(DENSE, batch=256, data=data, tensor=8, sequence=True, software=program, sharded=how).peak_bytes
        for how in SHARDED
    )
    assert weights <= gradients <= optimizer <= none
    assert weights < none


def test_parameters_and_state_are_what_megatron_documents():
    """6 + 12/d bytes of a parameter: bf16 weights, fp32 gradients; the state with its master copy among the data ranks."""
    model = PlannedModel(spec=preset("llama3-8b"))
    for data in (1, 8):
        found = planned(model, data=data, sharded="optimizer").owners
        count = preset("llama3-8b").parameters()
        assert found[PARAMETERS] == pytest.approx(2 * count, rel=1e-4)
        assert found[GRADIENTS] == pytest.approx(4 * count, rel=1e-4)
        assert found[OPTIMIZER_STATE] == pytest.approx(12 * count / data, rel=1e-4)


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (8, False), (8, True)])
def test_layers_keep_what_korthikanti_et_al_count(tensor, sequence):
    """arXiv 2205.05198, table 2: sbh(34 + 5as/h) bytes of a layer; with t tensor ranks 10 + 24/t, or all of it by t."""
    one = layer_bytes(
        PlannedModel(spec=GPT), False, Ranks(tensor, sequence, 1, "ring", 1), software("megatron-2021"), "fp16", False
    )
    h, a, s = GPT.d_model, GPT.n_heads, 2048
    plain = h * (34 / tensor if sequence else 10 + 24 / tensor)
    assert one.saved("none", s) == pytest.approx((plain, 5 * a * s / tensor))
    assert one.saved("selective", s) == pytest.approx((plain, 0))
    assert one.saved("full", s) == pytest.approx((2 * h / (tensor if sequence else 1), 0))


@pytest.mark.parametrize("checkpoint", [0, 1])
@pytest.mark.parametrize(("name", "batch", "context"), SMALL_PYTORCH)
def test_one_gpu_holds_what_the_shape_simulator_finds(name, batch, context, checkpoint):
    """Op by op it is right to a per cent of what was measured (benchmarks/results/prediction-memory-2026-11.md)."""
    known = peak_bytes(
        workload(name, batch=batch, context=context, precision="bf16", checkpoint=checkpoint), gpu("h100")
    )
    how = "full" if checkpoint else "none"
    model = PlannedModel(spec=preset(name))
    found = planned(model, batch=batch, length=context, micro_batch=batch, software="pytorch", recompute=how)
    assert tensors(found) == pytest.approx(known, rel=0.02)


@pytest.mark.parametrize(
    ("data", "sharded", "measured_gib"),
    [(1, "none", 4.36), (2, "none", 3.56), (1, "weights", 3.76), (2, "weights", 1.97)],
)
def test_ranks_hold_what_was_measured_on_an_h200(data, sharded, measured_gib):
    """`small`, batch 8, bf16: one process, DDP and FSDP2 (benchmarks/results/parallel-2026-11.md)."""
    model = PlannedModel(spec=preset("small"))
    found = planned(model, batch=8, length=512, data=data, micro_batch=8 // data, sharded=sharded, software="pytorch")
    assert tensors(found) / 2**30 == pytest.approx(measured_gib, rel=0.03)


def test_activations_grow_with_the_micro_batch_and_fall_with_context_ranks():
    one, two = (planned(DENSE, tensor=8, micro_batch=n).owners[ACTIVATIONS] for n in (1, 2))
    assert two == pytest.approx(2 * one)
    for way in ("ring", "ulysses"):
        halved = planned(DENSE, tensor=8, context=2, context_way=way).owners[ACTIVATIONS]
        assert halved == pytest.approx(one / 2)


def test_the_first_stage_keeps_a_micro_batch_for_each_stage():
    """1F1B: as many under way as there are stages, so that a pipeline does not lower what layers keep."""
    alone = planned(DENSE, software="megatron").owners[ACTIVATIONS]
    for stages in (2, 4, 8):
        assert planned(DENSE, pipeline=stages).owners[ACTIVATIONS] == pytest.approx(alone, rel=0.02)
        parts = planned(DENSE, pipeline=stages, virtual=2, schedule="interleaved").owners[ACTIVATIONS]
        assert parts == pytest.approx(alone * (1 + (stages - 1) / (2 * stages)), rel=0.02)


def test_fewer_micro_batches_than_stages_keep_less():
    many, few = (planned(DENSE, batch=n, pipeline=8).owners[ACTIVATIONS] for n in (64, 4))
    assert few == pytest.approx(many / 2, rel=0.02)


def test_logits_are_held_by_the_last_stage_alone():
    narrow = msgspec.structs.replace(DENSE, spec=msgspec.structs.replace(DENSE.spec, n_layers=8))
    assert LOGITS in planned(narrow, recompute="full").owners
    assert LOGITS not in planned(narrow, pipeline=8, batch=64).owners


def test_expert_ranks_share_the_experts():
    count = MIXTURE.expert_layers * MIXTURE.expert_parameters()
    one, many = (planned(MIXTURE, data=64, expert=n).owners[PARAMETERS] for n in (1, 64))
    assert one - many == pytest.approx(2 * count * (1 - 1 / 64), rel=1e-6)


def test_a_token_is_kept_once_for_each_of_its_experts():
    twice = msgspec.structs.replace(MIXTURE, experts=msgspec.structs.replace(MIXTURE.experts, chosen=8))
    few, more = (planned(model, data=64, expert=64).owners[ACTIVATIONS] for model in (MIXTURE, twice))
    each = 4096 * MIXTURE.expert_layers * (2 * 4096 + 2 * 3 * 2048)  # what arrives; gate, up and their product
    assert more - few == pytest.approx(4 * each, rel=1e-6)


def test_offloaded_state_is_not_on_the_gpu():
    kept, gone = (planned(DENSE, tensor=8, offload=away) for away in (False, True))
    assert OPTIMIZER_STATE not in gone.owners
    assert kept.peak_bytes - gone.peak_bytes == pytest.approx(kept.owners[OPTIMIZER_STATE])


def test_hybrid_groups_hold_more_than_all_ranks_together():
    alone, group = (
        planned(DENSE, data=32, sharded="weights", shard_ranks=ranks, software="torchtitan", recompute="full")
        for ranks in (0, 8)
    )
    assert group.owners[OPTIMIZER_STATE] == pytest.approx(4 * alone.owners[OPTIMIZER_STATE], rel=1e-6)


def test_written_scores_are_of_all_keys():
    short, long = (planned(DENSE, batch=64, length=n, tensor=8, software="megatron-2021") for n in (2048, 4096))
    assert long.owners[SCORES] == pytest.approx(4 * short.owners[SCORES])
    assert SCORES not in planned(DENSE, tensor=8).owners


def test_low_precision_keeps_fewer_bytes_of_activations():
    words = ("bf16", "mxfp8", "fp8", "nvfp4")
    sizes = [planned(DENSE, tensor=8, sequence=True, precision=word).owners[ACTIVATIONS] for word in words]
    assert sizes == sorted(sizes, reverse=True)
