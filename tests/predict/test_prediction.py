"""The one door: what a prediction has, whichever predictor is behind it, and what is refused."""

import msgspec
import pytest

from flopwise.errors import FlopwiseError
from flopwise.predict.account import Questions, account_for
from flopwise.predict.machine import Machine, machine_with
from flopwise.predict.prediction import peak_bytes, predict, predict_each, predict_quickly
from flopwise.records.memory import StoredPredictions, predictions_path, read_predictions
from flopwise.records.prediction import DRY_RUN, SHAPES
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload
from flopwise.work.operation import WORKSPACE

H200 = machine_with(gpu("h200"))
OWN, OP = workload("tiny"), workload("op:mlp", set={"dim": 64, "layers": 2, "steps": 1})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("asked", "source"), [(OWN, SHAPES), (OP, DRY_RUN)])
def test_a_prediction_has_time_by_phase_memory_by_owner_and_the_operations(asked, source):
    pytest.importorskip("torch")
    found = predict(asked, H200)
    assert found.memory.source == source
    assert sum(phase.wall_ns for phase in found.time.phases) == pytest.approx(found.time.wall_ns)
    assert sum(found.memory.peak.owners.values()) == max(phase.peak_bytes for phase in found.memory.phases)
    assert {op.phase for op in found.ops} >= {phase.phase for phase in found.time.phases}
    assert found.useful_flops > 0
    assert found.limit.seconds * 1e9 < found.time.wall_ns
    assert found.time_with(H200.ceilings) == found.time


def test_without_ceilings_there_is_no_time_and_without_a_gpu_no_limit():
    found = predict(OWN)
    assert (found.time, found.limit) == (None, None)
    assert found.memory.peak_bytes > 0


def test_machines_of_one_kind_share_a_step_and_have_times_of_their_own():
    h100, h200, a100 = predict_each(OWN, [machine_with(gpu(name)) for name in ("h100", "h200", "a100")])
    assert h100.step is h200.step is not a100.step
    assert h100.time.wall_ns != h200.time.wall_ns


def test_the_cpu_has_no_workspace_and_says_what_it_is():
    on_cpu, on_gpu = (predict(OWN, Machine(gpu=gpu(name))).memory for name in ("cpu", "h200"))
    assert WORKSPACE in on_gpu.peak.owners
    assert WORKSPACE not in on_cpu.peak.owners
    assert on_gpu.peak_bytes - on_cpu.peak_bytes == on_gpu.peak.owners[WORKSPACE] == 2 * 32 * 2**20
    assert on_cpu.notes


@pytest.mark.parametrize("target", ["op:attention", "py:my.step:make"])
def test_what_takes_a_dry_run_is_not_known_at_once(target):
    asked = workload(target)
    assert predict_quickly(asked, H200) is peak_bytes(asked) is None


def test_neither_is_a_model_too_deep_to_go_through():
    assert predict_quickly(workload("tiny", set={"n_layers": 2000}), H200) is None


@pytest.mark.parametrize("asked", [{"tokens": 1e9}, {"inference": True}, {"optimizer_bits": 8}])
def test_what_follows_from_a_models_shapes_is_refused_for_other_code(asked):
    with pytest.raises(FlopwiseError, match=r"flopwise's own models, not for op:mlp"):
        account_for(OP, (H200,), Questions(**asked))


def test_a_kernel_that_cannot_run_on_a_gpu_is_refused_there_alone():
    asked = workload("tiny", attention="sdpa-flash")
    with pytest.raises(FlopwiseError, match="cannot run fp32"):
        predict(asked, H200)
    assert predict(asked, Machine(gpu=gpu("cpu"))).ops


def test_predictions_of_older_runs_are_read_under_todays_name(tmp_path):
    snapshot, kept = tmp_path / "1f.pickle", StoredPredictions(predictions=(predict(OWN).step.memory(),))
    older = msgspec.json.encode(kept).replace(SHAPES.encode(), b"closed form")
    predictions_path(snapshot).write_bytes(older)
    assert read_predictions(snapshot) == kept
