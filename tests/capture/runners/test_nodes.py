"""Which share of a node a trial gets, and what no node can ever run."""

import pytest

from flopwise.capture.runners.nodes import Needs, Node, Share, share, trial_needs
from flopwise.errors import FlopwiseError
from flopwise.spec.workload import Sampling, Trial, workload

DGX, SMALL, CPU = Node(96, 8), Node(16, 2), Node(64)


def test_one_rank_has_one_gpu_and_its_part_of_the_cpus_on_any_node():
    given = share(Needs(device="cuda"), [DGX, SMALL, CPU])
    assert given == Share(cpus=8, gpus=1)  # 96 / 8 would not leave each of SMALL's GPUs enough
    assert given.fits(DGX)
    assert given.fits(SMALL)
    assert not given.fits(CPU)


def test_auto_is_the_gpu_where_there_is_one():
    assert share(Needs(), [CPU, DGX]).gpus == 1
    assert share(Needs(), [CPU]) == Share(cpus=64, whole=True)


def test_many_ranks_have_a_whole_node():
    given = share(Needs(device="cuda", ranks=4), [DGX, SMALL, CPU])
    assert given == Share(cpus=96, gpus=8, whole=True)
    assert not given.fits(SMALL)


def test_a_trial_on_the_cpu_has_a_whole_node_of_the_largest_kind():
    assert share(Needs(device="cpu"), [SMALL, CPU, Node(32)]) == Share(cpus=64, whole=True)


@pytest.mark.parametrize(
    ("needs", "nodes", "said"),
    [
        (Needs(device="cuda"), [CPU], "it needs a GPU, and of 1 nodes there is none"),
        (Needs(device="cuda", ranks=16), [DGX, SMALL], "16 GPUs on one node, and of 2 nodes the most on one is 8"),
        (Needs(device="cuda:1"), [DGX], "names one GPU of a machine"),
        (Needs(device="cpu"), [Node(0)], "no node that is up, with a CPU"),
        (Needs(), [], "no node that is up"),
    ],
)
def test_what_can_never_run_is_refused_with_what_there_is(needs, nodes, said):
    with pytest.raises(FlopwiseError) as refused:
        share(needs, nodes)
    assert said in refused.value.message
    assert refused.value.hint


def test_the_time_asked_for_covers_every_process_of_the_trial_and_its_start():
    trial = Trial(workload=workload("tiny"), sampling=Sampling(processes=3, timeout_s=600.0))
    assert trial_needs(trial).minutes == 36  # three times ten, five to start, rounded up


def test_the_ranks_of_a_step_that_several_share_are_asked_for_on_one_node():
    trial = Trial(workload=workload("tiny", batch=4, parallel="ddp", ranks=4), sampling=Sampling(), device="cuda")
    assert share(trial_needs(trial), [DGX, SMALL]) == Share(cpus=96, gpus=8, whole=True, minutes=21)
    with pytest.raises(FlopwiseError, match="4 GPUs on one node"):
        share(trial_needs(trial), [SMALL])
