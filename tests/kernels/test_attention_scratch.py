"""What our attention's backward pass allocates beside its results is what both predictors say of it."""

import math
from types import SimpleNamespace

import pytest
import torch

from flopwise.capture.watch.own_ops import passing_bytes
from flopwise.kernels import attention_backward
from flopwise.kernels.attention_gluon import gluon_kernels
from flopwise.kernels.attention_tiles import Problem
from flopwise.predict.shapes import fused
from flopwise.predict.shapes.tape import Parameter, Tape
from flopwise.spec.dtypes import dtype_name
from flopwise.torch_private import TorchDispatchMode
from flopwise.work.allocator import MIN_BLOCK

SHAPES = [
    ((2, 3, 4096, 128), (2, 3, 4096, 128)),
    ((1, 2, 4097, 128), (1, 2, 4097, 128)),  # padded to whole tiles
    ((1, 2, 100, 128), (1, 2, 4096, 128)),
    ((1, 2, 4095, 128), (1, 2, 4095, 128)),
    ((1, 4, 4096, 128), (1, 2, 4096, 128)),  # grouped heads
    ((1, 2, 4096, 64), (1, 2, 4096, 64)),
]


class Allocations(TorchDispatchMode):
    """The bytes of every new tensor."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.bytes.append(out.nbytes)
        return out


class AnyGrid:
    """A kernel that is launched over nothing."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


@pytest.fixture
def launched(monkeypatch):
    """The wrapper's own code on tensors without data, as on sm_90; nothing is launched."""
    gluon = gluon_kernels()
    if gluon is None:
        pytest.skip("this Triton has no Gluon that is known to do")
    call = SimpleNamespace(launch=lambda: None)
    for module, name in [(gluon, "backward_call")] + [
        (attention_backward, f"{it}_call") for it in ("delta", "dkdv", "dq")
    ]:
        monkeypatch.setattr(module, name, lambda *_: call)
    monkeypatch.setattr(gluon, "_flash_prepare_kernel", AnyGrid())
    monkeypatch.setattr(attention_backward, "gluon_on", lambda _: gluon)
    monkeypatch.setattr(attention_backward, "trusted", lambda *_: True)
    return attention_backward.launch_backward


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_its_allocations_are_known(launched, queries, keys, dtype, window):
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in (queries, keys))
    args = (q, q, k, k, q, q.new_empty(queries[:3], dtype=torch.float32), True, window, 1.0)
    with Allocations() as seen:
        results = launched(*args[:6], Problem(*args[6:]))
    held = sum(seen.bytes) - sum(x.nbytes for x in results)
    assert held >= 4 * math.prod(queries[:3])
    assert held == passing_bytes("flash_backward", args, list(args[:6]), True)
    if window is None:  # which the reference model has not
        assert 0 <= simulated(queries, keys, dtype_name(dtype)) - held < 2 * MIN_BLOCK


def simulated(queries, keys, dtype):
    """What the shape simulator holds for it, in whole blocks."""
    t = Tape()
    q, k, v = (t.tensor(shape, dtype) for shape in (queries, keys, keys))
    q.node = Parameter("q", q)
    out = fused.sdpa(t, q, k, v, "triton", tf32=False, by_head=False, hopper=True)
    grad, before = t.tensor(queries, dtype), t.live_bytes
    grads = out.node.backward(t, grad, out.node.saved.tensors)
    return t.peak_bytes - before - sum(one.n_bytes for one in grads)
