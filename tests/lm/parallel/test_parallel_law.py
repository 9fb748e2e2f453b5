"""The law of data parallelism: several ranks with a part of the batch each end with the weights of one with all of it."""

from functools import cache

import pytest
import torch

from .cases import CASES, alone
from .launch import KEPT, Results, run_all

expected = cache(alone)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return run_all(request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, case in CASES.items() for way in case.ways])
def test_every_rank_ends_with_the_weights_of_a_single_process(name: str, way: str, ended: list[Results]) -> None:
    want = expected(name, len(ended))
    exact = next(iter(want.values())).dtype == torch.float64
    # A weight that differs in its last fp32 bit may be another bf16 number.
    close = 5e-4 if CASES[name].dtype is torch.bfloat16 else 1e-9 if exact else 1e-5
    for results in ended:
        assert list(results[name, way]) == list(want)
        torch.testing.assert_close(results[name, way], want, rtol=close, atol=close)


def test_a_rank_keeps_an_equal_part_of_every_matrix_and_all_of_every_vector(ended: list[Results]) -> None:
    for results in ended:
        for name, p in CASES["tiny"].model().named_parameters():
            part = -(-p.numel() // len(ended)) if p.dim() > 1 else p.numel()
            assert results[KEPT]["weights"][name] == part
        assert not results[KEPT]["gathered"]


def test_the_states_of_all_ranks_together_are_those_of_the_unsharded_optimizer(ended: list[Results]) -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size)) for size in (9, 2, 7, 4, 5)]
    whole = torch.optim.AdamW(weights)
    torch.cat(weights).square().sum().backward()
    whole.step()
    want = whole.state_dict()
    states = [results[KEPT]["state"] for results in ended]
    merged = {number: state for each in states for number, state in each.items()}
    torch.testing.assert_close(merged, want["state"])
    assert sum(map(len, states)) == len(weights)  # each is kept once
    assert all(results[KEPT]["groups"] == want["param_groups"] for results in ended)
    elements = [sum(len(state["exp_avg"]) for state in each.values()) for each in states]
    assert max(elements) - min(elements) <= 2
