"""The lecture's bounds on exchange, and its questions (examples/plan_questions.py)."""

import runpy
from pathlib import Path

import pytest

from flopwise.predict.parallel.step import planned_step
from flopwise.records.planned import DATA, TENSOR
from flopwise.spec.cluster import cluster
from flopwise.spec.layout import Job, Layout
from flopwise.spec.planned_presets import planned_model

QUESTIONS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "plan_questions.py"))


def exposed(part, context=2048, link="", **layout):
    """The share of a step that is exchanged while nothing is computed."""
    laid = Layout(software="torchtitan", recompute="full", **layout)
    batch = 4 * laid.data * laid.micro_batch
    asked = Job(
        model=planned_model("llama3-8b"), cluster=cluster("dgx-h100", link), layout=laid, batch=batch, context=context
    )
    step = planned_step(asked)
    return step.parts[part] / step.wall_s


def test_gathers_hide_from_the_bound_on():
    bound = QUESTIONS["fsdp_tokens"]()
    assert bound == pytest.approx(2473, abs=1)
    shares = [exposed(DATA, 256 * n, data=64, sharded="weights") for n in (1, 4, 16, 64)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5  # at a tenth of it
    assert shares[-1] < 0.1  # at six times


def test_a_slower_network_moves_the_bound():
    few = [
        exposed(DATA, data=64, sharded="weights", micro_batch=4, link=f"nvlink4,ib{n}") for n in (100, 200, 400, 800)
    ]
    assert few == sorted(few, reverse=True)


def test_tensor_ranks_beyond_nvlink_are_exposed():
    near, far = (exposed(TENSOR, tensor=8, sequence=True, link=link) for link in ("nvlink4,ib400", "pcie4,ib400"))
    assert far > 2 * near
    assert QUESTIONS["tensor_ranks"](14336) > 4


@pytest.mark.slow
def test_the_lectures_questions():
    rule, counted, predicted = QUESTIONS["days_of_70b"]()
    assert rule == pytest.approx(143.9, abs=0.1)
    assert rule < counted
    assert 0.5 * counted < predicted < 2 * counted
