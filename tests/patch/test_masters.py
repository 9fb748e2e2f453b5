"""Exact fp32 weights around any optimizer: to the last bit, at few launches, within its step, and also when it fails."""

import math

import pytest
import torch
from torch import nn

from flopwise.kernels.adamw import joined
from flopwise.patch.levers import PatchedModel
from flopwise.patch.masters import split_exactly
from flopwise.predict.machine import machine_with
from flopwise.predict.prediction import predict
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import workload

CASTS = 12  # launches a weight: five to join it, five to split it, its gradient there and back
STEP = """
import torch
from torch import nn

def make(device="cpu"):
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(256, 64)}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 256, device=device)

    def step():
        optimizer.zero_grad()
        y = x
        for block in model["blocks"]:
            y = y + block(y)
        model["head"](y).float().square().mean().backward()
        optimizer.step()

    return step
"""
SHAPES = [(512, 256), (512,), (256, 512), (256,)] * 2 + [(64, 256), (64,)]


def test_a_weight_is_split_and_joined_to_the_last_bit():
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,)).int()
    ties = (torch.randint(-(2**15), 2**15, (1000,)).int() << 16) + 0x8000
    edges = torch.tensor([0, -(2**31), 0x7F800000, 0x7FFFFFFF, -1, 0x3F7FFFFF], dtype=torch.int32)
    weight = torch.cat([bits, ties, edges]).view(torch.float32)
    size = weight.abs()
    weight = weight[
        ~((size > 0) & (size < 2**-126)) & ~((size > 3.38e38) & size.isfinite())
    ]  # what bf16 has no room for
    p, low = torch.empty_like(weight, dtype=torch.bfloat16), torch.empty_like(weight, dtype=torch.int16)
    split_exactly(weight, p, low)
    torch.testing.assert_close(joined(p, low), weight, rtol=0, atol=0, equal_nan=True)
    off, nearest = (p.double() - weight.double()).abs(), (weight.bfloat16().double() - weight.double()).abs()
    assert torch.equal(off[weight.isfinite()], nearest[weight.isfinite()])


@pytest.fixture
def predicted(tmp_path):
    (tmp_path / "own.py").write_text(STEP)
    machine = machine_with(gpu("h200"))
    return {
        p: predict(workload(f"{tmp_path / 'own.py'}:make", precision=p), machine)
        for p in ("bf16", "bf16-master", "fp8")
    }


def test_parameters_are_counted_once_and_the_casts_are_the_optimizers(predicted):
    for precision, found in predicted.items():
        assert found.step.parameters == sum(math.prod(shape) for shape in SHAPES)
        assert found.step.parameters_bytes == found.step.parameters * (4 if precision == "bf16" else 2)
        casts = [op for op in found.ops if op.phase == "optimizer" and op.kernels and op.kind != "optimizer"]
        assert sum(op.kernels for op in casts) == (0 if precision == "bf16" else CASTS * len(SHAPES))
    plain, exact = ({one.phase: one for one in predicted[p].time.phases} for p in ("bf16", "bf16-master"))
    assert plain.keys() == exact.keys()
    for phase in plain.keys() - {"optimizer"}:  # no weight is cast there
        assert exact[phase].host_ns < plain[phase].host_ns
        assert exact[phase].kernels < plain[phase].kernels


def test_a_step_that_fails_leaves_the_weights_in_bf16():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    PatchedModel([model], [optimizer], {"precision": "bf16-master"}).install()

    def fails():
        assert model.weight.dtype == torch.float32
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(fails)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
