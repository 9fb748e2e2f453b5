"""Probes of a machine's limits, at sizes that tell nothing but run everywhere."""

import pytest
import torch

from flopwise.capture.calibrate import different_kernels
from flopwise.capture.host_probes import HostTimer, host_probe_count
from flopwise.capture.probes import (
    Stopwatch,
    cold_runs,
    memory_runs,
    probe_attention,
    probe_backward_matmul,
    probe_matmul,
    probe_memory,
)
from flopwise.predict.shapes.step import account_step
from flopwise.predict.step_time import counts_by_phase
from flopwise.records.ceilings import STRIDED


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
    assert {probe.dtype for probe in probe_attention(watch, ("fp32",), ((1, 2, 16, 8),), "flash")} == {"fp32, flash"}
    assert list(probe_attention(watch, ("fp32",), ((1, 2, 16, 8),), "cudnn")) == []  # of a GPU alone
    there, back = probe_backward_matmul(watch, ("fp32",), ((8, 16, 4),))
    assert (there.shape, back.shape, there.dtype) == ((1, 8, 4, 16), (1, 16, 4, 8), "fp32, backward")


@pytest.mark.slow
def test_half_precision_and_cold_inputs_run_where_they_are_asked_for():
    cpu = torch.device("cpu")
    for run, moved in memory_runs(cpu, 1 << 16, half=True).values():
        run()
        assert moved > 0
    assert cold_runs(cpu, 1 << 16) == {}  # so many small tensors would all fit a cache
    ((run, moved),) = cold_runs(cpu, 1 << 23).values()
    run()
    assert moved == 1 << 23
    assert all(isinstance(run(), torch.Tensor) for run in different_kernels(cpu))


def test_small_steps_tell_the_hosts_time_for_every_phase():
    steps = (
        (1, "train", {"optimizer": "foreach"}),
        (2, "train", {"optimizer": "adamw-loop"}),
        (1, "forward", {}),
        (1, "train", {"optimizer": "foreach", "checkpoint": 1}),
    )
    watch = HostTimer(torch.device("cpu"), steps)
    watch.round()
    found = list(watch.probes(lambda workload: counts_by_phase(account_step(workload).ops)))
    assert len(found) == host_probe_count(steps)
    names = {"forward", "backward", "optimizer", "lists", "inference", "checkpointed"}
    assert {probe.what for probe in found} == {f"host:{name}" for name in names}
    assert all(probe.ns > 0 and probe.shape[0] > 0 for probe in found)
    assert len({probe.shape for probe in found if probe.what == "host:forward"}) == 2
