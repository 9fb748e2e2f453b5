"""Probes of a machine's limits, at sizes that tell nothing but run everywhere."""

import torch

from flopwise.capture.probes import Stopwatch, probe_attention, probe_matmul, probe_memory
from flopwise.ceilings import STRIDED


def test_every_probe_runs_and_says_what_it_moved():
    watch = Stopwatch(torch.device("cpu"))
    memory = list(probe_memory(watch, (1 << 16, 1 << 18)))
    assert {probe.what for probe in memory} >= {"elementwise", STRIDED, "softmax", "optimizer", "copy/cast"}
    assert all(probe.ns > 0 for probe in memory)
    small, large = (probe.amount for probe in memory if probe.what == "elementwise")
    assert (small, large) == (1 << 16, 1 << 18)
    (product,) = probe_matmul(watch, ("fp32",), ((2, 8, 16, 4),))
    assert (product.amount, product.shape) == (2.0 * 2 * 8 * 16 * 4, (2, 8, 16, 4))
    forward, backward = probe_attention(watch, ("fp32",), ((1, 2, 16, 8),))
    assert (forward.amount, backward.amount) == (4.0 * 2 * 16 * 16 * 8, 10.0 * 2 * 16 * 16 * 8)
