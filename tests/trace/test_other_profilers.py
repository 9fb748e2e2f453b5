"""Profiles of other frameworks and accelerators are refused with what they are, and with what flopwise would read instead."""

import json

import pytest

from flopwise.errors import FlopwiseError
from flopwise.trace.read import read_trace

JAX = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0 NVIDIA H100 80GB HBM3"}},
    {"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}},
    {"ph": "X", "pid": 1, "tid": 14, "ts": 5.1, "dur": 3.2, "name": "loop_add_fusion",
     "args": {"hlo_module": "jit_train_step", "hlo_op": "loop_add_fusion", "correlation_id": "12"}},
    {"ph": "X", "pid": 701, "tid": 3, "ts": 1.0, "dur": 2.0, "name": "PjitFunction(train_step)"},
]  # fmt: skip
TPU = [{"ph": "X", "pid": 3, "tid": 1, "ts": 1.0, "dur": 2.0, "name": "fusion.1", "args": {"hlo_op": "fusion.1"}}]
OP = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9, "ts": 1.0, "dur": 8.0}
MTIA = [OP, {"ph": "X", "cat": "mtia_ccp_events", "name": "fc_kernel", "pid": 1, "tid": 2, "ts": 3.0, "dur": 4.0}]
KERNEL = {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_nn", "pid": 0, "tid": 7, "ts": 2.0, "dur": 4.0}


def written(tmp_path, events):
    path = tmp_path / "t.trace.json"
    path.write_text(json.dumps({"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": events}))
    return path


@pytest.mark.parametrize("events", [JAX, TPU])
def test_a_profile_of_jax_is_refused_as_one(tmp_path, events):
    with pytest.raises(FlopwiseError) as refused:
        read_trace(written(tmp_path, events))
    assert "is a profile of JAX or TensorFlow (XLA), not of PyTorch" in refused.value.message
    assert "nsys profile" in refused.value.hint


def test_a_trace_of_an_mtia_is_refused_as_one(tmp_path):
    with pytest.raises(FlopwiseError) as refused:
        read_trace(written(tmp_path, MTIA))
    assert "is a trace of Meta's MTIA accelerator" in refused.value.message


def test_a_trace_of_a_gaudi_is_not_explained_by_its_host(tmp_path):
    """A past bug: 'on the CPU: op-bound', as if nothing had run anywhere else."""
    with pytest.raises(FlopwiseError, match="is a trace of Intel's Gaudi accelerator"):
        read_trace(written(tmp_path, [OP, {**MTIA[1], "cat": "hpu_op"}]))


def test_pytorchs_own_are_read_whatever_else_they_hold(tmp_path):
    assert read_trace(written(tmp_path, [OP, *JAX])).ops.height == 1
    assert read_trace(written(tmp_path, [KERNEL, *MTIA])).kernels.height == 1


def test_a_trace_of_nobody_is_refused_without_a_guess(tmp_path):
    with pytest.raises(FlopwiseError, match="is not a PyTorch trace: none of its 1 events"):
        read_trace(
            written(tmp_path, [{"ph": "X", "cat": "disk", "name": "read", "pid": 1, "tid": 1, "ts": 1, "dur": 1}])
        )


@pytest.mark.parametrize(
    ("name", "hint"),
    [("a.pftrace", "--output-format json"), ("r.db", "--output-format json"), ("h.xplane.pb", "nsys profile")],
)
def test_files_of_others_have_a_hint_of_their_own(tmp_path, name, hint):
    path = tmp_path / name
    path.write_bytes(b"x")
    with pytest.raises(FlopwiseError) as refused:
        read_trace(path)
    assert hint in refused.value.hint
