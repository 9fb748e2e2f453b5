"""What a lever would change of the peak is what the shape simulator says of the workload with that lever."""

import math

import pytest

from flopwise.predict.fit import checkpoint_sizes, memory_levers
from flopwise.predict.prediction import peak_bytes
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload

LONG = {"context": 512, "attention": "naive", "set": {"n_layers": 8}}


@pytest.fixture(scope="module")
def effects():
    return {effect.lever: effect for effect in memory_levers(workload("tiny", **LONG))}


@pytest.mark.parametrize("lever", ["--checkpoint 2", "--precision bf16-pure", "--attention sdpa", "--precision bf16"])
def test_a_lever_saves_what_its_workload_takes_less(effects, lever):
    name, value = lever.removeprefix("--").split()
    there = peak_bytes(workload("tiny", **(LONG | {name: value})))
    assert effects[lever].peak_bytes == there
    assert effects[lever].saved_bytes == peak_bytes(workload("tiny", **LONG)) - there > 0


def test_levers_are_ordered_and_those_that_are_set_are_left_out(effects):
    saved = [effect.saved_bytes for effect in effects.values()]
    assert saved == sorted(saved, reverse=True)
    set_already = memory_levers(workload("tiny", **(LONG | {"attention": "sdpa", "loss": "chunked", "checkpoint": 2})))
    assert not {"--attention sdpa", "--loss chunked", "--checkpoint 2"} & {effect.lever for effect in set_already}


def test_what_the_step_cannot_do_is_told_from_the_owners(effects):
    kept, in_backward = effects["gradients kept as zeros, not set to none"], effects["--overlap on"]
    assert kept.how.startswith("from the owners")
    gradients = 4 * workload("tiny", **LONG).subject.parameters()
    assert -gradients * 1.02 < kept.saved_bytes <= 0 <= in_backward.saved_bytes < gradients * 2


def test_the_optimizer_in_backward_spares_most_gradients_where_the_optimizer_has_the_peak():
    work = workload("small", batch=1, context=16)
    effect = next(e for e in memory_levers(work) if e.lever == "--overlap on")
    parameters = 4 * work.subject.parameters()
    assert effect.saved_bytes > 1.6 * parameters  # the gradients and foreach's temporaries, but for two groups'


def test_loss_scaling_and_a_step_that_has_it_are_not_offered_the_optimizer_in_backward():
    for given in ({"precision": "fp16"}, {"overlap": "on"}):
        assert "--overlap on" not in {effect.lever for effect in memory_levers(workload("tiny", **given))}


@pytest.mark.slow
def test_the_cpu_has_no_workspace():
    work = workload("tiny", **LONG)
    on_gpu, on_cpu = (memory_levers(work, one) for one in (None, gpu("cpu")))
    assert {a.peak_bytes - b.peak_bytes for a, b in zip(on_gpu, on_cpu, strict=True)} == {2 * 32 * 2**20}


@pytest.mark.parametrize("precision", ["bf16-master", "fp8"])
def test_what_a_workload_would_refuse_is_no_lever(precision):
    found = memory_levers(workload("small", precision=precision), gpu("h200"), quick=True)
    assert {"--optimizer fused"}.isdisjoint(effect.lever for effect in found)
    for effect in found:
        if effect.levers:
            options = {lever: int(value) if lever == "checkpoint" else value for lever, value in effect.levers.items()}
            workload("small", **({"precision": precision, "optimizer": "flopwise"} | options))


def test_others_steps_have_no_levers():
    assert memory_levers(workload("op:attention")) == ()


@pytest.mark.parametrize("layers", [1, 2, 12, 32, 126])
def test_segments_worth_trying_include_the_square_root(layers):
    sizes = checkpoint_sizes(layers)
    assert sizes[0] == 1
    assert max(1, round(math.sqrt(layers))) in sizes
    assert max(sizes) <= max(1, layers // 2, round(math.sqrt(layers)))
