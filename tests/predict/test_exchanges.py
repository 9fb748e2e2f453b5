"""What ranks exchange, by formula: beside the parameters and activations that every way has to move."""

import pytest

from flopwise.predict.exchanges import exchange_ns, exchanged
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload

WAYS = ("ddp", "zero1", "fsdp2", "tp", "fsdp2+tp", "pp", "own-ddp-bucketed", "own-fsdp", "own-zero1")
SHAPE = {"tied": False}


def moved(way, kind, **options):
    found = exchanged(workload("small", batch=8, parallel=way, set=SHAPE, **({"ranks": 4} | options)))
    return sum(one.times * one.n_bytes for one in found if one.kind == kind)


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_exchanges_nothing_and_more_do(way):
    ranks = 2 if "+" not in way else 4
    alone = {} if "+" in way else {"ranks": 1}
    if alone:
        assert exchanged(workload("small", batch=8, parallel=way, set=SHAPE, **alone)) == ()
    found = exchanged(workload("small", batch=8, parallel=way, ranks=ranks, set=SHAPE))
    assert exchange_ns(found, gpu("h100")) > 0
    assert exchange_ns(found, gpu("a100")) > exchange_ns(found, gpu("h100"))


def test_gradients_of_all_weights_are_reduced():
    parameters = workload("small", set=SHAPE).subject.parameters()
    assert moved("ddp", "all-reduce") == 4 * parameters
    assert moved("fsdp2", "reduce-scatter") == 4 * parameters
    assert parameters * 4 < moved("fsdp2", "all-gather") < 8 * parameters
    assert moved("fsdp2", "all-gather", precision="bf16") == moved("fsdp2", "all-gather") / 2


def test_activations_are_reduced_four_times_a_layer():
    assert moved("tp", "all-reduce") == 4 * 12 * 8 * 512 * 768 * 4
    assert moved("pp", "send and receive") == 2 * 8 * 512 * 768 * 4
