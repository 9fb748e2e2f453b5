"""What only a GPU can show of memory: PyTorch's own history, with every owner known, beside the dry run."""

import pickle

import pytest
import torch

import flopwise
from flopwise.records.run import OK, OOM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return flopwise.memory("small", device="cuda", attention="naive", runs=tmp_path_factory.mktemp("runs"))


def test_owners_are_exact_and_add_up(small):
    found = small.devices[0]
    assert (small.status, found.exact) == (OK, True)
    assert found.known_share == pytest.approx(1.0, abs=1e-3)
    assert sum(found.peak.owners.values()) == found.peak.allocated_bytes
    parameters = 4 * flopwise.workload("small").subject.parameters()
    assert found.end.owners["parameters"] == pytest.approx(parameters, rel=0.02)
    assert found.end.owners["optimizer state"] == pytest.approx(2 * parameters, rel=0.02)


def test_the_recorded_peak_is_an_unwatched_steps_and_the_dry_runs(small):
    found = small.devices[0]
    dry, closed = small.predictions
    assert found.peak.allocated_bytes == pytest.approx(dry.peak.total_bytes, rel=0.03)
    assert found.peak.allocated_bytes == pytest.approx(closed.peak.total_bytes, rel=0.1)
    assert any("a step that was not recorded" in note for note in small.notes)


def test_steps_phases_and_saved_tensors_are_found(small):
    found = small.devices[0]
    assert (found.growth.steps, found.growth.bytes_per_step) == (3, 0)
    assert {"forward", "loss", "backward", "optimizer"} <= set(found.phases)
    assert found.saved[0].blocks == 12
    assert found.named[1].kept >= 12


def test_pytorchs_viewer_reads_the_file(small):
    from torch.cuda import _memory_viz

    with open(small.path, "rb") as file:
        assert "entries" in _memory_viz.trace(pickle.load(file))


def test_running_out_is_kept_with_what_was_needed(tmp_path):
    free = torch.cuda.mem_get_info()[0]
    batch = max(
        4, free // (12 * 12 * 1024 * 1024 * 4)
    )  # one fp32 score per layer and head fills the GPU; four are kept
    found = flopwise.memory(
        "small", device="cuda", phase="backward", batch=batch, context=1024, attention="naive", runs=tmp_path
    )
    assert found.status == OOM
    assert any("it would have needed" in note for note in found.notes)
    if found.devices:
        assert found.devices[0].ooms
