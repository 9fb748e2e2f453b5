"""Every version's fields become one record; what is not a snapshot is said in one line."""

import copy

import pytest
from gen_snapshot import made

from flopwise.errors import FlopwiseError
from flopwise.snapshot.read import snapshot_of
from flopwise.snapshot.report import report
from flopwise.snapshot.snapshot import BEFORE


def event(action, addr, size=1024, **more):
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def lives(*events, segments=()):
    table = snapshot_of({"device_traces": [list(events)], "segments": list(segments)}).devices[0].allocations
    return sorted(table.select("start", "end", "bytes").rows())


def segment(*blocks, address=0, device=0):
    found = [{"size": size, "requested_size": asked, "state": state, "frames": []} for size, asked, state in blocks]
    return {"device": device, "address": address, "total_size": sum(b[0] for b in blocks), "stream": 0, "blocks": found}


def test_an_allocation_ends_when_its_free_is_requested():
    assert lives(event("alloc", 1), event("free_requested", 1), event("free_completed", 1)) == [(0, 1, 1024)]


def test_a_free_that_was_only_completed_ends_it_too():
    assert lives(event("alloc", 1), event("free_completed", 1)) == [(0, 1, 1024)]


def test_a_free_of_something_unknown_was_there_before():
    assert lives(event("free_requested", 9, 700), event("free_completed", 9, 700)) == [(BEFORE, 0, 1024)]


def test_the_end_of_a_free_requested_before_the_recording_is_nothing():
    events = [event("free_completed", 9), event("alloc", 1), event("free_requested", 1), event("free_completed", 1)]
    assert lives(*events) == [(1, 2, 1024)]


def test_an_address_used_again_without_a_free_ends_the_first():
    assert lives(event("alloc", 1), event("alloc", 1, 512)) == [(0, 1, 1024), (1, 2, 512)]


def test_blocks_of_the_end_give_true_sizes_and_what_was_always_there():
    blocks = segment(
        (2048, 2000, "active_allocated"), (512, 0, "inactive"), (4096, 4000, "active_allocated"), address=100
    )
    assert lives(event("alloc", 100, 1000), segments=[blocks]) == [(BEFORE, 1, 4096), (0, 1, 2048)]


def test_blocks_awaiting_their_free_are_not_allocated():
    assert lives(segments=[segment((2048, 2000, "active_pending_free"))]) == []


def test_a_block_allocated_after_the_recording_is_left_out_and_said():
    blocks = segment((1024, 1024, "active_allocated"), address=7)
    raw = {"device_traces": [[event("alloc", 7), event("free_requested", 7)]], "segments": [blocks]}
    device = snapshot_of(raw).devices[0]
    assert len(device.allocations) == 1
    assert [note.key for note in device.notes] == ["later"]


def test_history_instead_of_frames_and_segments_alone():
    block = {"size": 1024, "state": "active_allocated", "history": [{"addr": 0, "real_size": 900, "frames": []}]}
    raw = [{"address": 0, "total_size": 1024, "stream": 0, "blocks": [block]}]
    row = snapshot_of(raw).devices[0].allocations.row(0, named=True)
    assert (row["bytes"], row["requested_bytes"]) == (1024, 900)


def test_reserved_is_counted_back_from_the_end():
    events = [
        event("segment_alloc", 0, 2**21),
        event("segment_map", 2**21, 2**20),
        event("segment_unmap", 2**21, 2**20),
    ]
    raw = {"device_traces": [events], "segments": [segment((2**21, 0, "inactive"), (2**20, 0, "inactive"))]}
    assert snapshot_of(raw).devices[0].reserved_bytes.tolist() == [2**20, 3 * 2**20, 2**22, 3 * 2**20]


def test_devices_are_kept_apart_and_the_highest_peak_comes_first():
    raw = {"device_traces": [[event("alloc", 1)], [], [event("alloc", 1, 4096)]], "segments": []}
    assert [d.device for d in report(snapshot_of(raw)).devices] == [2, 0]


def test_the_old_format_gives_the_same_answers_without_a_clock():
    new, old = (report(snapshot_of(made(old=old)[0])).devices[0] for old in (False, True))
    assert (new.peak.owners, new.peak.event) == (old.peak.owners, old.peak.event)
    assert (new.peak.time_us is None, old.peak.time_us is None) == (False, True)


def test_stacks_are_stored_once():
    raw, truth = made()
    snapshot = snapshot_of(raw)
    assert {tuple(f.name for f in snapshot.stack(i)) for i in range(len(snapshot.stacks))} >= {
        tuple(f["name"] for f in piece.stack) for piece in truth.pieces
    }
    assert len(snapshot.stacks) == len(set(snapshot.stacks)) < 30
    unshared = snapshot_of(
        copy.deepcopy(raw) | {"device_traces": [[copy.deepcopy(e) for e in raw["device_traces"][0]]]}
    )
    assert unshared.stacks == snapshot.stacks


BAD = {
    "nothing": ({}, "neither"),
    "a number": (3, "neither"),
    "no device": ({"segments": [], "device_traces": [[]]}, "is empty"),
    "trace is a dict": ({"device_traces": [{"a": 1}]}, "not a list"),
    "traces are text": ({"device_traces": "no"}, "is str"),
    "event is a list": ({"device_traces": [[[]]]}, "holds list"),
    "no action": ({"device_traces": [[{"size": 1}]]}, "no 'action'"),
    "size is text": ({"device_traces": [[event("alloc", 1, "x")]]}, "'size' .* is str, not int"),
    "size is true": ({"device_traces": [[event("alloc", 1, True)]]}, "is bool, not int"),
    "size is negative": ({"device_traces": [[event("alloc", 1, -5)]]}, "-5 bytes"),
    "size is absurd": ({"device_traces": [[event("alloc", 1, 2**60)]]}, "bytes"),
    "size is endless": ({"device_traces": [[event("alloc", 1, 2**80)]]}, "more than 64 bits"),
    "time is text": ({"device_traces": [[event("alloc", 1, time_us="now")]]}, "'time_us' .* is str"),
    "addr is a list": ({"device_traces": [[event("alloc", [])]]}, "'addr' .* is list"),
    "frames is text": ({"device_traces": [[event("alloc", 1, frames="x")]]}, "'frames' is str"),
    "frame is text": ({"device_traces": [[event("alloc", 1, frames=["x"])]]}, "holds str"),
    "frame's line is text": ({"device_traces": [[event("alloc", 1, frames=[{"line": "x"}])]]}, "frame"),
    "metadata is a number": ({"device_traces": [[event("alloc", 1, user_metadata=3)]]}, "user_metadata"),
    "segment is text": ({"segments": ["x"]}, "'segments' holds str"),
    "blocks is text": ({"segments": [{"address": 0, "total_size": 1, "blocks": "x"}]}, "'blocks' is str"),
    "device is -1": ({"segments": [segment((512, 1, "inactive"), device=-1)]}, "-1"),
    "device is a million": ({"segments": [segment((512, 1, "inactive"), device=10**6)]}, "1000000"),
    "oom without sense": ({"device_traces": [[event("oom", 0, device_free="x")]]}, "device_free"),
    "annotation": ({"segments": [segment((512, 1, "inactive"))], "external_annotations": [{"name": 3}]}, "'name'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_field_is_named(kind):
    raw, said = BAD[kind]
    with pytest.raises(FlopwiseError, match=said):
        snapshot_of(raw)


FRAMES = [{"filename": "/me/gpt.py", "line": 3, "name": "forward"}]
BLOCK = {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": FRAMES}
EVENT = {"action": "alloc", "addr": 1, "size": 512, "stream": 0}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"segments": [{"address": 512, "total_size": 512, "blocks": [BLOCK]}] * 2}, "two at one address"),
        ({"segments": [{"address": i, "total_size": 0, "blocks": FRAMES} for i in range(2)]}, "one list several times"),
        ({"device_traces": [[EVENT]] * 2}, "one list several times"),
    ],
)
def test_what_a_pickle_only_refers_to_again_is_not_read_again(raw, said):
    with pytest.raises(FlopwiseError, match=said):
        snapshot_of(raw)


def test_names_of_megabytes_are_cut_before_they_are_looked_at():
    long = "x" * 2**20
    frames = [{"filename": long, "line": i, "name": long} for i in range(3)]
    event = {**EVENT, "frames": frames, "user_metadata": long}
    mark = {"name": long, "stage": "START", "device": 0, "time_us": 1}
    found = snapshot_of({"device_traces": [[event]], "external_annotations": [mark]})
    names = [one.name for one in (*found.frames, *found.devices[0].annotations)]
    assert max(map(len, (*names, *found.hints))) == 1024
