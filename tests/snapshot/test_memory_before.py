"""A recording that begins in the middle of a training: what was there before is split by its size, and by nothing else."""

import pytest
from gen_snapshot import made

from flopwise.api.memory import memory
from flopwise.errors import FlopwiseError
from flopwise.predict.shapes.network import weight_shapes
from flopwise.render.memory_screen import memory_screen
from flopwise.render.one_screen import text
from flopwise.snapshot.before import element_counts
from flopwise.snapshot.read import snapshot_of
from flopwise.snapshot.report import report
from flopwise.spec.model import preset


def late(**options):
    """A snapshot whose recording begins with its last two steps, and without stacks of what was allocated before."""
    whole, _ = made(steps=4, **options)
    two, _ = made(steps=2, **options)
    raw, cut = made(steps=4, keep=(len(whole["device_traces"][0]) - len(two["device_traces"][0])), **options)
    recorded = {entry["addr"] for entry in raw["device_traces"][0] if entry["action"] == "alloc"}
    for segment in raw["segments"]:
        for block in segment["blocks"]:
            if block["address"] not in recorded:
                block["frames"] = []
    return raw, cut


@pytest.mark.parametrize("options", [{}, {"stacks": "all"}, {"context": 512, "dim": 512}, {"recompute": True}])
def test_the_gradients_of_a_step_tell_parameters_from_optimizer_state(options):
    raw, truth = late(**options)
    device = report(snapshot_of(raw)).devices[0]
    at_end = truth.bytes_at(truth.events)
    assert device.before_bytes > device.peak.allocated_bytes / 3
    for owner in ("parameters", "optimizer state"):
        assert device.end.owners[owner] == at_end[owner]
    assert device.end.owners.get("unknown", 0) == 0
    assert device.guessed_share > 0.3  # what only sizes tell is not called known


def blocks(*sizes):
    at, found = 512, []
    for size in sizes:
        takes = -(-size // 512) * 512
        one = {"size": takes, "requested_size": size, "state": "active_allocated", "address": at, "frames": []}
        found.append(one)
        at += takes
    return {"segments": [{"device": 0, "address": 512, "total_size": at - 512, "stream": 0, "blocks": found}]}


def sizes_of(model, how="separate", item=4):
    return [
        n * item
        for n, count in element_counts(weight_shapes(preset(model), how).values()).items()
        for _ in range(count)
    ]


def owners_of(sizes, model="tiny"):
    forms = [element_counts(weight_shapes(preset(model), how).values()) for how in ("separate", "fused")]
    return report(snapshot_of(blocks(*sizes)), models=forms).devices[0]


@pytest.mark.parametrize("how", ["separate", "fused"])
@pytest.mark.parametrize("item", [4, 2])
def test_weights_alone_are_the_models_whatever_their_form_and_precision(how, item):
    weights = sizes_of("tiny", how, item)
    other = 123_456
    device = owners_of([*weights, other])
    rounded = sum(-(-size // 512) * 512 for size in weights)
    assert device.end.owners == {"parameters": rounded, "unknown": 123_904}


def test_two_more_of_each_are_adams_moments_also_in_fp32_beside_bf16_weights():
    weights = sizes_of("tiny")
    assert set(owners_of(weights * 3).end.owners) == {"parameters", "optimizer state"}
    thirds = owners_of(weights * 3).end.owners
    assert thirds["optimizer state"] == 2 * thirds["parameters"]


def test_one_copy_more_without_a_step_could_be_anything():
    assert set(owners_of(sizes_of("tiny") * 2).end.owners) == {"parameters", "unknown"}


def test_another_model_is_not_forced_upon_a_snapshot():
    device = owners_of(sizes_of("small"))
    assert set(device.end.owners) == {"unknown"}
    assert device.note_keys == ("model_differs",)


def test_without_a_model_it_says_what_would_tell():
    assert report(snapshot_of(blocks(*sizes_of("tiny")))).devices[0].note_keys == ("before_unknown",)


def test_a_model_is_for_a_snapshot():
    with pytest.raises(FlopwiseError, match="model is for a snapshot"):
        memory("tiny", model="tiny", device="cpu")


def test_an_mlp_as_wide_as_the_vocabulary_makes_no_logits():
    """Its output and its gradient have the logits' size: with 4 · dim words, only what the head made is known to be logits."""
    raw, _ = made(steps=2, vocab=4 * 96)
    usual, _ = made(steps=2)
    found, expected = (report(snapshot_of(one)).devices[0] for one in (raw, usual))
    one = 4 * 2 * 64 * 4 * 96
    assert found.peak.owners["logits"] <= 2 * one + 512
    assert expected.peak.owners["activations"] == found.peak.owners["activations"]


def test_weights_as_large_as_a_cublas_workspace_are_weights():
    """Llama 3.2 1B has 48 matrices of exactly 32 MiB in bf16; without the model they are unknown, not 1.5 GiB of workspace."""
    weights = sizes_of("llama3.2-1b", item=2)
    found = owners_of(weights, "llama3.2-1b").end.owners
    assert found == {"parameters": sum(-(-size // 512) * 512 for size in weights)}
    assert set(report(snapshot_of(blocks(*weights))).devices[0].end.owners) == {"unknown"}


def test_one_workspace_beside_other_weights_is_still_told():
    found = owners_of([*sizes_of("tiny"), 32 * 2**20]).end.owners
    assert found["workspace"] == 32 * 2**20


def test_activations_of_32_mib_at_the_end_are_no_workspaces():
    """4096 × 4096 in bf16, kept by every layer of a forward pass in which the recording ends."""
    where = [{"filename": "/me/gpt.py", "line": 3, "name": "forward"}]
    size = 32 * 2**20
    events = [
        {"action": "alloc", "addr": (n + 1) * size, "size": size, "stream": 0, "frames": where} for n in range(12)
    ]
    device = report(snapshot_of({"segments": [], "device_traces": [events]})).devices[0]
    assert device.end.owners == {"activations": 12 * size}


def test_a_cache_larger_than_the_model_is_not_called_another_model():
    device = owners_of([*sizes_of("tiny"), *[2**24] * 8])
    assert set(device.end.owners) == {"parameters", "unknown"}
    assert device.note_keys == ("before_other_sizes",)
    assert device.known_share == 0  # not -5.6e-17, which reads as -0 %


def test_the_screen_says_what_is_known_guessed_and_left_out():
    sizes = sizes_of("llama3.2-1b", item=2)
    raw = blocks(*sizes)
    raw["segments"].append({**raw["segments"][0], "device": 1, "blocks": raw["segments"][0]["blocks"][:5]})
    forms = [element_counts(weight_shapes(preset("llama3.2-1b"), "separate").values())]
    shown = text(memory_screen(report(snapshot_of(raw), models=forms)))
    assert "Owner known for 0 % of the peak, guessed from the size alone for 100 %." in shown
    assert "2 devices; this is device 0, with the highest peak." in shown
    other = text(memory_screen(report(snapshot_of(raw), models=[element_counts([(77, 1003)])])))
    assert "in other sizes than the model's parameters: another model" in " ".join(other.split())
    assert max(map(len, other.splitlines())) <= 80
