"""A problem that was planted is found, and named first."""

import os
from pathlib import Path

import pytest
import torch

import flopwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Whatever else could be mended is: one launch, fused pieces, half precision.
MENDED = {
    "precision": "bf16", "norm": "triton", "activation": "triton", "rope": "triton", "loss": "full",
    "optimizer": "flopwise", "batch": 16, "context": 512,
}  # fmt: skip


def found(tmp_path, target, **options):
    run = flopwise.profile(target, seconds=1, runs=tmp_path, **options)
    findings = flopwise.findings(run)
    for one in findings:
        print(one.rule, round(one.saving_ns / 1e6, 3), one.counted_ns and round(one.counted_ns / 1e6, 3), one.title)
        print("    ", one.arithmetic, "|", *one.evidence[:3])
    return findings


def test_a_loss_that_is_asked_for_in_the_loop(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    first = found(tmp_path, "py:gpu_steps:adds_up_its_losses", stacks=True)[0]
    assert first.rule == "host_syncs"
    assert any("gpu_steps.py" in line for line in first.evidence)


def test_matmuls_in_fp32(tmp_path):
    assert found(tmp_path, "small", **MENDED | {"precision": "fp32"})[0].rule in ("fp32_matmul", "tf32_off")


def test_a_vocabulary_that_is_not_aligned(tmp_path):
    first = found(tmp_path, "small", **MENDED, set={"vocab": 50257})[0]
    assert first.rule == "unaligned"
    assert "50,257" in first.title


def test_nothing_of_the_kind_where_nothing_was_planted(tmp_path):
    rules = {one.rule for one in found(tmp_path, "small", **MENDED)}
    assert not rules & {"host_syncs", "fp32_matmul", "tf32_off", "unaligned", "naive_attention", "eager_pieces"}
