import math

import pytest
import torch

from flopwise.capture.agreement import Results, compare, sample_gradients
from flopwise.errors import FlopwiseError
from flopwise.records.events import AgreementRequest, AgreementResult
from flopwise.spec.workload import Sampling, Trial, workload

UNFUSED = {"attention": "naive", "norm": "eager", "activation": "eager"}


def trial(**levers):
    return Trial(workload=workload("tiny", batch=2, **levers), sampling=Sampling(), device="cpu")


@pytest.fixture(scope="module")
def checked(tmp_path_factory, worker):
    """The agreement of a recipe with the reference, in the worker's process."""
    path = str(tmp_path_factory.mktemp("reference") / "reference.npz")
    first = worker.agree(trial(**UNFUSED), AgreementRequest(path=path, write=True))
    assert (first.gradient_error, first.loss_error, first.draws) == (0.0, 0.0, False)
    return lambda **levers: worker.agree(trial(**levers), AgreementRequest(path=path))


def test_what_computes_the_same_agrees_to_rounding(checked):
    for levers in ({}, {"optimizer": "fused"}, {"loss": "chunked"}, {"checkpoint": 1}, {"projections": "fused"}):
        found = checked(**levers)
        assert len(found.losses) == 3
        assert found.gradient_error < 1e-5
        assert found.loss_error < 1e-5
        assert found.n_weights == 21


@pytest.mark.slow  # a CPU without bf16
def test_weights_in_bf16_with_masters_are_as_near_as_autocast_and_nearer_than_without(checked):
    cast, kept = checked(precision="bf16"), checked(precision="bf16-master", optimizer="flopwise")
    assert kept.loss_error < 5 * cast.loss_error
    assert kept.gradient_error < 3 * cast.gradient_error
    assert 10 * kept.loss_error < checked(precision="bf16-pure", optimizer="flopwise").loss_error


@pytest.mark.slow
def test_bf16_is_further_off_and_not_far(checked):
    found = checked(precision="bf16")
    assert 1e-4 < found.gradient_error < 0.1
    assert found.worst_error >= found.gradient_error
    assert found.worst


def test_another_step_does_not_agree(checked):
    assert checked(context=64).loss_error > 1e-3


def test_a_step_without_loss_and_gradients_is_refused(worker):
    step = Trial(workload=workload("op:gelu", set={"rows": 8, "cols": 8}), sampling=Sampling(), device="cpu")
    with pytest.raises(FlopwiseError, match="neither a loss nor gradients"):
        worker.agree(step, AgreementRequest(path="unused"))


def test_a_step_with_dropout_draws_random_numbers(tmp_path, worker, own_step):
    request = AgreementRequest(path=str(tmp_path / "reference.npz"), write=True)
    assert worker.agree(own_step("with_dropout"), request).draws


@pytest.mark.parametrize("name", ["ends", "ends_later"])
def test_a_step_that_ends_its_process_is_reported_in_one_line(tmp_path, worker, own_step, name):
    with pytest.raises(FlopwiseError, match="ended with code 0 and no result"):
        worker.agree(own_step(name), AgreementRequest(path=str(tmp_path / "reference.npz"), write=True))


def test_a_nan_is_the_worst_and_a_loss_scale_is_taken_out():
    import numpy as np

    truth = {"a": (np.array([1.0, 2.0]), 2), "b": (np.array([3.0]), 1)}
    broken = {"a": (np.array([1.0, 2.0]), 2), "b": (np.array([float("nan")]), 1)}
    assert compare(Results([], broken), Results([], truth)).worst == "b"
    scaled = Results([], {name: (values * 1024, n) for name, (values, n) in truth.items()})
    assert compare(scaled, Results([], truth), any_scale=True).gradient_error == pytest.approx(0.0, abs=1e-12)
    assert compare(scaled, Results([], truth)).gradient_error > 100


@pytest.mark.parametrize("name", ["learns", "learns_in_a_mapping"])
def test_a_step_of_the_users_own_shows_the_loss_it_returns_and_its_gradients(tmp_path, worker, name):
    step = Trial(workload=workload(f"py:steps:{name}"), sampling=Sampling(seconds=0.1), device="cpu")
    path = str(tmp_path / "reference.npz")
    found = worker.agree(step, AgreementRequest(path=path, write=True))
    assert found.n_weights == 2
    assert found.losses[0] > found.losses[-1] > 0
    seen = []
    point = worker.run(step, on_event=seen.append, compare=AgreementRequest(path=path))
    (agreed,) = [event.agreement for event in seen if isinstance(event, AgreementResult)]
    assert (agreed.loss_error, agreed.gradient_error, agreed.losses) == (0.0, 0.0, found.losses)
    assert point.status == "ok"
    assert len(point.warmup_ns) >= 6  # those that were compared among them


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_what_is_not_finite_is_told_and_not_written_as_numbers(bad):
    model = torch.nn.Linear(2, 1, bias=False)

    def once():
        model.zero_grad()
        (model(torch.ones(1, 2)).sum() * (math.nan if bad == "gradient" else 1.0)).backward()
        return torch.tensor(math.inf if bad == "loss" else 1.0)

    losses = [float(once())]
    problem = Results(losses, sample_gradients(model)).problem()
    assert problem == ("the loss is not finite" if bad == "loss" else "the gradient of weight is not finite")
