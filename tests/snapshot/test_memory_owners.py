"""Owners against a generator's truth, byte for byte, and against PyTorch's own profiler on a real program."""

import re
from collections import Counter
from itertools import pairwise

import pytest
from gen_snapshot import made

from flopwise.records.memory import Knowledge, KnownTensor
from flopwise.snapshot.owners import OWNERS, owners
from flopwise.snapshot.phases import frame_phase, phases, stack_phases
from flopwise.snapshot.read import snapshot_of
from flopwise.snapshot.report import report
from flopwise.snapshot.snapshot import Frame
from flopwise.snapshot.stacks import short
from flopwise.snapshot.steps import steps

HISTORIES = {
    "Python stacks": {},
    "C++ stacks": {"stacks": "all"},
    "backward on the caller's thread": {"stacks": "cpu"},
    "checkpointing": {"recompute": True},
    "checkpointing, backward on the caller's thread": {"recompute": True, "stacks": "cpu"},
    "a leak": {"leak_bytes": 5000},
    "out of memory in step 2": {"oom_at_step": 2},
    "out of memory in the first forward": {"oom_at_step": 0},
    "torch 2.1": {"old": True},
    "with ranges": {"annotations": True},
    "ring buffer cut in backward": {"keep": 300},
    "ring buffer cut in forward": {"keep": 360},
    "frees without stacks": {"frees_have_stacks": False},
    "frees with the stacks of their allocations": {"frees_repeat_stacks": True},
    "frees with the stacks of their allocations, with ranges": {"frees_repeat_stacks": True, "annotations": True},
    "frees with the stacks of their allocations, C++ stacks": {"frees_repeat_stacks": True, "stacks": "all"},
    "no optimizer": {"optimizer": False},
    "large pool": {"context": 512, "dim": 512, "steps": 2},
    "one step": {"steps": 1},
}


def told(snapshot, number=0):
    device = snapshot.devices[number]
    by_stack = stack_phases(snapshot)
    when = phases(snapshot, device, by_stack)
    found = owners(snapshot, device, by_stack, when, steps(device, when))
    columns = [device.allocations[name].to_list() for name in ("start", "end", "bytes")]
    return list(zip(*columns, (OWNERS[i] for i in found.owner), strict=True))


@pytest.mark.parametrize("kind", HISTORIES)
def test_every_allocation_has_its_true_life_and_owner(kind):
    raw, truth = made(**HISTORIES[kind])
    assert Counter(told(snapshot_of(raw))) == Counter((p.start, p.end, p.block, p.owner) for p in truth.pieces)


@pytest.mark.parametrize("kind", ["Python stacks", "checkpointing", "ring buffer cut in backward"])
def test_the_peak_and_its_composition_are_the_truth(kind):
    raw, truth = made(**HISTORIES[kind])
    device = report(snapshot_of(raw)).devices[0]
    by_moment = [truth.bytes_at(moment) for moment in range(truth.events + 1)]
    assert device.peak.allocated_bytes == max(sum(found.values()) for found in by_moment)
    assert device.peak.owners == by_moment[device.peak.event + 1]
    unknown = device.peak.owners.get("unknown", 0) / device.peak.allocated_bytes
    assert device.known_share == pytest.approx(1 - unknown - device.guessed_share)
    assert device.end.owners == by_moment[-1]
    in_segments = sum(segment["total_size"] for segment in raw["segments"])
    assert device.end.reserved_bytes == in_segments
    for phase, most in device.phases.items():
        assert most <= device.peak.allocated_bytes, phase


def test_frees_name_no_phase_where_they_carry_their_allocations_stacks():
    raw, _ = made(steps=3, annotations=True, frees_repeat_stacks=True)
    phase = report(snapshot_of(raw)).devices[0].timeline.phase
    turns = [name for before, name in pairwise(["", *phase]) if name != before]
    assert turns[1:] == ["data", "forward", "loss", "backward", "optimizer"] * 3


def test_what_only_its_size_tells_is_not_called_known():
    raw, truth = made(steps=2)
    device = report(snapshot_of(raw)).devices[0]
    flowing = next(p.block for p in truth.pieces if p.owner == "logits" and p.requested > 512)
    assert device.guessed_share == pytest.approx(2 * flowing / device.peak.allocated_bytes)
    frames = [{"filename": "/me/gpt.py", "line": 3, "name": "forward"}]
    block = {"size": 2**25, "requested_size": 2**25, "state": "active_allocated", "address": 512, "frames": frames}
    segment = {"device": 0, "address": 512, "total_size": 2**25, "stream": 0, "blocks": [block]}
    cublas = report(snapshot_of({"segments": [segment], "device_traces": []})).devices[0]
    assert (cublas.peak.owners, cublas.known_share, cublas.guessed_share) == ({"workspace": 2**25}, 0.0, 1.0)


def test_backward_cut_short_leaves_unknown_what_could_be_either():
    raw, _ = made(stacks="cpu", steps=1)
    trace = raw["device_traces"][0]
    first = next(i for i, e in enumerate(trace) if e["frames"][0]["name"] == "_engine_run_backward")
    cut = {"device_traces": [trace[: first + 1]], "segments": []}
    lives = [row for row in told(snapshot_of(cut)) if row[0] == first]
    assert [row[3] for row in lives] == ["unknown"]  # the loss's own gradient: no parameter has its size


def test_without_stacks_nothing_is_claimed():
    raw, _ = made()
    for entry in raw["device_traces"][0]:
        entry.pop("frames", None)
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    device = report(snapshot_of(raw)).devices[0]
    assert set(device.peak.owners) == {"unknown"}
    assert device.known_share == 0


def test_what_the_program_says_goes_first():
    raw, _ = made(steps=1)
    for entry in raw["device_traces"][0]:
        entry["user_metadata"] = "flopwise.owner:buffers"
    assert {row[3] for row in told(snapshot_of(raw))} == {"buffers"}
    for entry in raw["device_traces"][0]:
        entry["user_metadata"], entry["category"] = "", "gradient"
    assert {row[3] for row in told(snapshot_of(raw))} == {"gradients"}


def test_ranges_tell_phases_where_stacks_do_not():
    events = []
    for step in range(3):
        for phase, name in enumerate(("forward", "backward", "Optimizer.step#AdamW.step")):
            at = 100 * step + 10 * phase
            events += [(name, "START", at), (name, "END", at + 9)]
    trace = []
    for step in range(3):
        trace.append({"action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 100 * step + 3})
        trace.append({"action": "alloc", "addr": 2, "size": 512, "stream": 0, "time_us": 100 * step + 13})
        trace.append({"action": "free_requested", "addr": 1, "size": 512, "stream": 0, "time_us": 100 * step + 14})
        trace.append({"action": "free_requested", "addr": 2, "size": 512, "stream": 0, "time_us": 100 * step + 25})
    marks = [{"name": name, "stage": stage, "time_us": at, "device": 0} for name, stage, at in events]
    snapshot = snapshot_of({"device_traces": [trace], "segments": [], "external_annotations": marks})
    assert [row[3] for row in told(snapshot)] == ["activations", "gradients"] * 3
    assert report(snapshot).devices[0].growth.steps == 3


def test_a_stack_is_shortened_to_the_users_frames_and_cannot_steer_a_terminal():
    site = "/v/lib/python3.11/site-packages/"
    frames = [
        Frame(site + "torch/nn/functional.py", 1, "linear"),
        Frame("", 0, "at::native::addmm(at::Tensor)"),
        Frame("/me/model\x1b[31m.py", 7, "forward"),
        Frame("/v/lib/python3.11/runpy.py", 86, "_run_code"),
        Frame("/me/train.py", 3, "main"),
    ]
    assert short(frames) == "model [31m.py:7 forward < train.py:3 main"
    assert short(frames[:1]) == "functional.py:1 linear"
    assert short([]) == ""


def test_a_recomputation_is_told_from_a_forward():
    site = "/v/site-packages/torch/"
    assert frame_phase(Frame(site + "utils/checkpoint.py", 1, "recompute_fn")) != frame_phase(
        Frame(site + "utils/checkpoint.py", 1, "checkpoint")
    )


CATEGORIES = {  # what PyTorch's profiler calls it, and what may be said of it from its stack and life
    "parameter": {"parameters", "temporary"},  # the profiler ends a tensor's life at every write into it
    "optimizer_state": {"optimizer state", "temporary"},
    "gradient": {"gradients"},
    "activation": {"activations", "attention scores", "logits", "temporary"},  # temporary: not saved for backward
    "autograd_detail": {"temporary"},
    "temporary": {"temporary"},
    "input": {"inputs"},
}


def test_owners_agree_with_pytorchs_own_categories_on_a_real_program():
    torch = pytest.importorskip("torch")
    from torch.cuda._memory_viz import _profile_to_snapshot
    from torch.nn import functional as F

    def get_batch():
        return torch.randn(16, 32), torch.randint(0, 10, (16,))

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10)
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            inputs, labels = get_batch()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    raw = _profile_to_snapshot(profiler)
    trace = next(trace for trace in raw["device_traces"] if trace)
    categories = [entry.pop("category", None) for entry in trace]
    for entry in trace:  # as an allocator would have written the stack; of a free the profiler has none
        entry["frames"] = [_frame(f["name"]) for f in entry["frames"]] if entry["action"] == "alloc" else []
    found = Counter((categories[start], owner) for start, _, _, owner in told(snapshot_of(raw)) if start >= 0)
    known = {pair: count for pair, count in found.items() if pair[0] in CATEGORIES}
    assert {category for category, _ in known} == set(CATEGORIES)
    assert {pair for pair in known if pair[1] not in CATEGORIES[pair[0]]} == set()


def _frame(name):
    match = re.match(r"(.*)\((\d+)\): (.*)", name)
    file, line, function = match.groups() if match else ("", "0", name)
    return {"filename": file, "line": int(line), "name": function}


def test_a_known_tensor_that_does_not_fit_its_block_is_another_ones():
    block = {"size": 2**25, "requested_size": 2**25, "state": "active_allocated", "address": 512, "frames": []}
    segment = {"device": 0, "address": 512, "total_size": 2**25, "stream": 0, "blocks": [block]}
    tensor = KnownTensor(
        event=-1, address=512, bytes=2**26, owner=0, op=0, module=0, phase=0, dtype=0, saved_by=0, shape=(2**24,)
    )
    knowledge = Knowledge(device="cuda:0", steps=1, words=("logits",), tensors=(tensor,))
    found = report(snapshot_of({"segments": [segment], "device_traces": []}), knowledge=knowledge).devices[0]
    assert found.peak.owners == {"workspace": 2**25}
