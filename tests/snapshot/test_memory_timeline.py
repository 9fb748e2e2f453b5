"""The law: at every instant the owners' bytes add up to the allocated bytes."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.snapshot.owners import OWNERS, owners
from flopwise.snapshot.phases import BACKWARD, FORWARD, Phases, phases, stack_phases
from flopwise.snapshot.read import snapshot_of
from flopwise.snapshot.report import _backward_start, report
from flopwise.snapshot.steps import Steps, steps
from flopwise.snapshot.timeline import alive, thinned, timeline

SITE = "/x/site-packages/torch/"
STACKS = [
    None,
    [],
    [("/me/train.py", "main")],
    [(SITE + "nn/functional.py", "linear"), ("/me/gpt.py", "forward")],
    [(SITE + "nn/functional.py", "cross_entropy")],
    [(SITE + "autograd/graph.py", "_engine_run_backward")],
    [(SITE + "optim/adamw.py", "_init_group")],
    [(SITE + "nn/modules/module.py", "_apply")],
    [("", "torch::autograd::Engine::thread_main")],
]
ACTIONS = (
    "alloc",
    "alloc",
    "alloc",
    "free_requested",
    "free_completed",
    "free",
    "segment_alloc",
    "segment_free",
    "oom",
    "odd",
)


@st.composite
def histories(draw):
    """Any order of any events, as no allocator would make them: the law holds for what was read."""
    trace = []
    for _ in range(draw(st.integers(0, 40))):
        stack = draw(st.sampled_from(STACKS))
        entry = {"action": draw(st.sampled_from(ACTIONS)), "addr": draw(st.integers(0, 6)), "stream": 0}
        entry["size"] = draw(st.integers(0, 5000))
        if stack is not None:
            entry["frames"] = [{"filename": f, "line": 1, "name": n} for f, n in stack]
        trace.append(entry)
    if draw(st.booleans()):
        clock = draw(st.integers(0, 100))
        trace = [entry | {"time_us": clock + 3 * i} for i, entry in enumerate(trace)]
    blocks = draw(
        st.lists(st.tuples(st.integers(0, 4096), st.sampled_from(["active_allocated", "inactive"])), max_size=6)
    )
    listed = [{"size": size, "requested_size": size, "state": state, "frames": []} for size, state in blocks]
    held = {"device": 0, "address": draw(st.integers(0, 3)), "total_size": sum(b[0] for b in blocks), "blocks": listed}
    ranges = draw(st.lists(st.tuples(st.sampled_from(["forward", "backward", "Optimizer.step#A"]),
                                     st.sampled_from(["START", "END"]), st.integers(0, 200)), max_size=6))  # fmt: skip
    marks = [{"name": n, "stage": s, "time_us": t, "device": 0} for n, s, t in ranges]
    return {"device_traces": [trace], "segments": [held], "external_annotations": marks}


@settings(max_examples=60, deadline=None)
@given(histories())
def test_the_owners_add_up_at_every_instant_and_agree_with_a_plain_count(raw):
    snapshot = snapshot_of(raw)
    device = snapshot.devices[0]
    told = stack_phases(snapshot)
    when = phases(snapshot, device, told)
    owner = owners(snapshot, device, told, when, steps(device, when)).owner
    line = timeline(device.allocations, owner, OWNERS, device.reserved_bytes)
    assert (line.by_owner_bytes.sum(axis=0) == line.allocated_bytes).all()
    rows = list(zip(*(device.allocations[name].to_list() for name in ("start", "end", "bytes")), owner, strict=True))
    for moment in range(device.events + 1):
        there = [(size, OWNERS[who]) for start, end, size, who in rows if start < moment <= end]
        assert line.allocated_bytes[moment] == sum(size for size, _ in there)
        assert line.at(moment) == {o: total for o in OWNERS if (total := sum(size for size, who in there if who == o))}
    found = report(snapshot).devices[0]
    assert sum(found.peak.owners.values()) == found.peak.allocated_bytes == line.allocated_bytes.max()
    assert found.peak.unused_bytes >= 0


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 10), st.integers(0, 2**50)), max_size=20))
def test_bytes_beyond_what_a_float_holds_are_exact(rows):
    rows = [(min(start, end), end, size) for start, end, size in rows]
    table = pl.DataFrame(rows, schema={"start": pl.Int64, "end": pl.Int64, "bytes": pl.Int64}, orient="row")
    line = timeline(table, np.zeros(len(rows), np.int64), ("all",), np.zeros(11, np.int64))
    for moment in range(11):
        assert line.allocated_bytes[moment] == sum(size for start, end, size in rows if start < moment <= end)
        assert line.allocated_bytes[moment] == table["bytes"].to_numpy()[alive(table, moment)].sum()


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=500), st.integers(4, 100))
def test_a_thinned_line_keeps_its_ends_and_extremes(values, most):
    values = np.array(values)
    kept = thinned(values, most)
    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


def test_an_allocation_without_an_owner_breaks_the_law_and_is_not_passed_over():
    table = pl.DataFrame({"start": [-1, 0], "end": [2, 1], "bytes": [512, 1024]})
    with pytest.raises(FlopwiseError, match="do not add up"):
        timeline(table, np.array([0, 2]), ("parameters", "temporary"), np.array([2048, 2048, 2048]))


def test_the_peak_of_every_phase_outlives_thinning():
    """A past bug: of a long recording, the table of phases showed peaks that were none."""
    rng = np.random.default_rng(3)
    values = rng.integers(0, 10**6, 20_000)
    phases = np.repeat(np.arange(40) % 4, 500)
    kept = set(thinned(values, 200, phases).tolist())
    for low in range(0, 20_000, 500):
        assert low + int(values[low : low + 500].argmax()) in kept
    assert len(kept) <= 200 + 40


def test_backward_begins_with_an_allocation():
    """What forward frees as it returns comes before, whatever op's name it carries: it is not kept for backward."""
    own = np.array([FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD])
    when = Phases(own=own, within=own, run=own, passes=own)
    starts = np.array([0, 1, 3])  # the event between is a free
    assert _backward_start(when, Steps(np.array([], dtype=np.int64), ""), starts) == 3
    assert _backward_start(when, Steps(np.array([], dtype=np.int64), ""), np.array([0, 1])) is None
