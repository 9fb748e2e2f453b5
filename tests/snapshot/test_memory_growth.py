"""A leak is named with its stack and its bytes; what is only late, or made once, is not."""

import pytest
from gen_snapshot import made

from flopwise.snapshot.read import snapshot_of
from flopwise.snapshot.report import report


def grown(**options):
    return report(snapshot_of(made(**options)[0])).devices[0].growth


@pytest.mark.parametrize("size", [512, 300_000])
def test_a_leak_is_named_with_its_stack_and_bytes(size):
    found = grown(steps=8, leak_bytes=size)
    (leak,) = found.leaks
    rounded = -(-size // 512) * 512
    assert (leak.bytes_per_step, leak.allocations_per_step, leak.owner) == (rounded, 1.0, "activations")
    assert leak.stack.startswith("gpt.py:77 forward")
    assert found.bytes_per_step == rounded
    assert (leak.steps, leak.of_steps) == (5, 5)


def test_steady_steps_leak_nothing_though_the_first_makes_the_optimizers_state():
    found = grown(steps=8)
    assert (found.leaks, found.bytes_per_step, found.leaks_sought) == ((), 0, True)
    assert found.start_bytes[1] > found.start_bytes[0]


def test_too_few_steps_are_not_judged():
    found = grown(steps=4, leak_bytes=4096)
    assert (found.leaks, found.leaks_sought) == ((), False)


@pytest.mark.parametrize(
    ("options", "how"),
    [({}, "the optimizer"), ({"optimizer": False}, "forward after backward"), ({"old": True}, "the optimizer")],
)
def test_steps_are_counted(options, how):
    found = grown(steps=6, **options)
    assert (found.steps, found.found_by) == (6, how)


def test_without_any_word_steps_are_found_by_their_period_or_not_at_all():
    def trace(lines):
        events = []
        for address, line in enumerate(lines):
            stack = [{"filename": "/me/a.py", "line": line, "name": "run"}]
            events.append({"action": "alloc", "addr": address, "size": 512, "stream": 0, "frames": stack})
        return report(snapshot_of({"device_traces": [events], "segments": []})).devices[0].growth

    even = trace([1, 2, 3, 4] * 8)
    assert (even.steps, even.found_by) == (8, "the period of the allocations")
    assert even.leaks[0].bytes_per_step == 512
    uneven = trace([1, 2, 1, 3, 3, 2, 1, 4, 4, 4, 4, 2, 1])
    assert (uneven.steps, uneven.found_by) == (0, "")


def test_the_first_steps_layers_are_not_taken_for_steps():
    assert grown(oom_at_step=0).steps == 0


def test_where_memory_grows_what_outlives_some_steps_is_listed():
    def frames(line, name):
        return [{"filename": "/me/gpt.py", "line": line, "name": name}]

    events, address = [], 0
    for step in range(8):
        made = {"forward": frames(1, "forward"), "kept": frames(2, "forward"), "optimizer": frames(3, "optimizer_step")}
        for kind, stack in made.items():
            address += 1
            if kind != "kept" or step % 2:
                events.append({"action": "alloc", "addr": address, "size": 5120, "stream": 0, "frames": stack})
            if kind != "kept":
                events.append({"action": "free_requested", "addr": address, "size": 5120, "stream": 0})
    growth = report(snapshot_of({"device_traces": [events], "segments": []})).devices[0].growth
    (leak,) = growth.leaks
    assert growth.bytes_per_step == 2560
    assert (leak.stack, leak.bytes_per_step, leak.steps, leak.of_steps) == ("gpt.py:2 forward", 5120, 2, 5)
