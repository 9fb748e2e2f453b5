"""The benchmark of the course's memory questions: its nested checkpoints, its queue, its rules."""

import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("altair")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

course_memory = pytest.importorskip("course_memory")
pages = pytest.importorskip("course_memory_pages")
nested = pytest.importorskip("nested_checkpoint")

from flopwise.snapshot.answers import TimelineLine  # noqa: E402
from flopwise.spec.workload import workload  # noqa: E402


class Counted(torch.nn.Module):
    """A block that counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(8, 8), 0

    def forward(self, x, angles):
        self.calls += 1
        return torch.tanh(self.layer(x))


def gradients(blocks, run):
    x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
    run(blocks, x).square().sum().backward()
    found = [x.grad, *(p.grad for block in blocks for p in block.parameters())]
    for block in blocks:
        block.zero_grad()
    return found


def plain(blocks, x):
    for block in blocks:
        x = block(x, None)
    return x


def test_nested_checkpoints_have_the_same_gradients_and_compute_a_block_once_for_each_level_more():
    torch.manual_seed(0)
    blocks = [Counted() for _ in range(8)]
    expected = gradients(blocks, plain)
    for block in blocks:
        block.calls = 0
    found = gradients(blocks, lambda blocks, x: nested.halves(blocks, x, None))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    calls = [block.calls for block in blocks]
    assert min(calls) >= 2
    assert max(calls) <= 1 + 3  # log2 of 8 blocks


def test_cases_side_by_side_never_need_more_than_there_is_and_all_of_them_come():
    sizes = {str(n): workload("tiny", batch=n, context=16) for n in (64, 32, 8, 4, 2, 1)}
    needs = {name: course_memory.predicted_peak(case, None) for name, case in sizes.items()}
    room = needs["32"] + needs["8"]
    queue, under_way, done, lock = course_memory.Queue(sizes, room), set(), [], threading.Lock()

    def work():
        while (name := queue.take()) is not None:
            with lock:
                under_way.add(name)
                assert len(under_way) == 1 or sum(needs[n] for n in under_way) <= room
            with lock:
                under_way.discard(name)
                done.append(name)
            queue.give_back(name)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == sorted(sizes)  # the largest alone, though there is no room for it


def test_the_best_checkpoint_is_named_by_its_peak_and_by_its_peak_at_little_cost():
    rows = [
        {"strategy": name, "step_ms": ms, "peak_bytes": peak * 2**30}
        for name, ms, peak in (("off", 100, 9), ("1", 134, 5), ("8", 130, 6), ("nested", 220, 4))
    ]
    (said,) = pages.best(rows)
    assert "Lowest peak: nested, 4.00 GiB at 220 ms." in said
    assert said.endswith("(130 ms): 1, 5.00 GiB at 134 ms.")
    assert pages.best([row | {"peak_bytes": None} for row in rows]) == []


def test_a_shortened_timeline_keeps_the_peak_of_every_phase():
    values = tuple(range(1000, 2000)) + tuple(range(1500, 500, -1))
    phases = ("forward",) * 1000 + ("backward",) * 1000
    line = TimelineLine(
        event=tuple(range(2000)), time_us=tuple(range(2000)), phase=phases, reserved_bytes=values,
        owners={"activations": values},
    )  # fmt: skip
    short = pages.shortened(line)
    assert len(short.event) <= pages.MOMENTS + 2
    for phase, most in (("forward", 1999), ("backward", 1500)):
        assert max(v for v, p in zip(short.owners["activations"], short.phase, strict=True) if p == phase) == most


def test_a_path_without_the_points_between_is_the_same_line():
    import re

    found = re.sub(r' d="(M[-\d.,L]+)(Z?)"', pages._straightened, ' d="M0,5L1.01,5L1.01,5L2,5L2,7L2,9.04L0,9.04Z"')
    assert found == ' d="M0,5L2,5L2,9L0,9Z"'


def test_the_largest_context_is_drawn_and_training_at_the_smallest():
    names = [f"tiny-t{t}-{phase}-{of}" for t in (16, 32) for phase in ("train", "forward") for of in ("fp32", "bf16")]
    assert pages.drawn(names) == [names[0], *names[4:]]


def test_owners_that_a_prediction_has_wrong_are_named_and_the_rounding_of_weights_is_no_error():
    recorded = {"parameters": 10 << 20, "workspace": 1 << 20, "gradients": 9 << 20}
    said = {"parameters": 8 << 20, "workspace": 3 << 20, "gradients": 4 << 20}
    assert pages.differing(said, recorded) == "gradients −5.00 MiB"
