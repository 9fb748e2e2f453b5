"""Laws of the search for layouts, on a machine whose times and bytes are simple enough to know."""

import msgspec
import pytest
from tests.predict.constant_mfu import memory, step

from flopwise.predict.parallel.search import Question, _variants, fits, kind, refused, search
from flopwise.spec.cluster import cluster
from flopwise.spec.layout import misfit
from flopwise.spec.planned_presets import planned_model

GB = 10**9


def question(model="llama3-8b", gpus=64, batch=512, context=8192, limit=80 * GB, where="dgx-h100", ranks=None, **fixed):
    return Question(
        model=planned_model(model),
        cluster=cluster(where),
        gpus=gpus,
        batch=batch,
        context=context,
        limit_bytes=limit,
        fixed=fixed | ({"context": ranks} if ranks else {}),
    )


ASKED = [
    question(),
    question("llama3-70b", gpus=256),
    question("llama3-405b", gpus=16384, batch=2048),
    question("llama3-8b", gpus=24, batch=480),
    question("mixtral-8x7b", gpus=64, context=4096),
    question("deepseek-v3", gpus=1024, batch=4096, context=4096),
    question("gpt-oss-120b", gpus=144, batch=576, context=4096, where="gb200-nvl72", limit=186 * GB),
    question("llama3-8b", gpus=64, batch=64, context=131_072),
]
NAMES = [f"{one.model.name}-{one.gpus}-{one.context}" for one in ASKED]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("asked", ASKED, ids=NAMES)
def test_every_layout_that_is_found_can_be_and_fits(asked):
    found = search(asked, step, memory)
    assert found.best
    for one in found.best:
        assert misfit(asked.model, one.layout, asked.batch, asked.context) is None
        assert one.layout.gpus == asked.gpus
        assert one.layout.tensor <= asked.cluster.domain
        assert one.memory.peak_bytes <= asked.limit_bytes
    assert all(held.peak_bytes > asked.limit_bytes for _, held in found.too_large)


@pytest.mark.parametrize("asked", ASKED[:5], ids=NAMES[:5])
def test_the_best_is_the_best_of_all_and_kinds_differ(asked):
    found = search(asked, step, memory)
    jobs = [
        asked.job(msgspec.structs.replace(one, recompute=again))
        for one in _variants(asked)
        for again in ("none", "selective", "full")
    ]
    least = min(step(job).wall_s for job in jobs if memory(job).peak_bytes <= asked.limit_bytes)
    times = [one.step.wall_s for one in found.best]
    assert times[0] == pytest.approx(least)
    assert times == sorted(times)
    assert len({kind(one.layout) for one in found.best}) == len(found.best)


@pytest.mark.parametrize(
    "fixed",
    [
        {"tensor": 4},
        {"pipeline": 4, "virtual": 2},
        {"context": 2},
        {"data": 16},
        {"sharded": "weights"},
        {"micro_batch": 2},
        {"recompute": "full"},
        {"schedule": "zero-bubble", "pipeline": 2},
        {"tensor": 2, "pipeline": 2, "data": 16},
        {"sequence": False, "tensor": 2},
    ],
    ids=str,
)
def test_constraints_are_kept(fixed):
    found = search(msgspec.structs.replace(question(), fixed=fixed), step, memory)
    assert found.best
    for one in found.best:
        assert {name: getattr(one.layout, name) for name in fixed} == fixed


def test_more_gpus_with_the_same_batch_are_not_slower():
    walls = [search(question(gpus=n, batch=1024), step, memory).best[0].step.wall_s for n in (8, 16, 32, 64, 128)]
    assert walls == sorted(walls, reverse=True)


def test_more_memory_is_not_slower():
    walls = [search(question("llama3-70b", limit=n * GB), step, memory).best[0].step.wall_s for n in (40, 60, 80, 141)]
    assert walls == sorted(walls, reverse=True)


def test_what_fits_is_found_where_the_search_finds_it():
    for limit in (1, 5, 20, 80):
        asked = question(gpus=8, limit=limit * GB)
        assert fits(asked, memory) == bool(search(asked, step, memory).best)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (question("llama3-405b", gpus=8), "llama3-405b does not fit on 8 GPUs: the leanest layout needs"),
        (question(tensor=3), "64 GPUs do not divide into --tp 3"),
        (question(tensor=64), "32 heads do not divide among 64 tensor ranks"),
        (question(data=64, tensor=2), "64 GPUs do not divide into --tp 2 --dp 64"),
        (question(tensor=2, pipeline=2, ranks=1, data=2), "64 GPUs do not divide into"),
        (question(pipeline=64), "64 × 1 stages are more than 32 layers"),
        (question(expert=8), "llama3-8b has no experts"),
        (question(batch=7, gpus=64, tensor=1, pipeline=1), "a batch of 7 does not divide among 64 data ranks"),
        (question(batch=510, micro_batch=4, tensor=1, pipeline=1), "a batch of 510 does not divide"),
        (question(virtual=2, pipeline=1), "need a pipeline"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_where_nothing_is_left_it_says_why(asked, says):
    found = search(asked, step, memory)
    assert not found.best
    error = refused(asked, found.too_large)
    assert says in error.message
    assert error.hint
