"""Rows for the tests of experiments, as they are stored."""

import re
from types import SimpleNamespace

import msgspec
import torch

from flopwise.experiments.bench import Bench
from flopwise.experiments.rows import Timed


def timed(ns, gpu=True, **other):
    """The fields of a time that is known exactly, on the GPU's clock or on the wall clock alone."""
    walls = {"wall_ns": ns, "wall_low_ns": ns, "wall_high_ns": ns, "samples": 9, "repeats": 1}
    return {**walls, "launch_ns": ns if gpu else None, "gpu_ns": ns if gpu else None, "gpu_exact": gpu, **other}


def on_the_wall(row, low=1.0, high=1.0, samples=9):
    """The row as a CPU would measure it, with an interval of so many times its time."""
    ns = row["wall_ns"]
    walls = {"wall_low_ns": low * ns, "wall_high_ns": high * ns, "samples": samples}
    return {**row, "gpu_ns": None, "launch_ns": None, "gpu_exact": False, **walls}


def measured(experiment, **given):
    """What a quick run on the CPU yields."""
    return msgspec.to_builtins(list(experiment.measure(Bench(torch.device("cpu"), quick=True, **given))))


class StandInKernel:
    registers, local_bytes = 32, 0

    def __call__(self, blocks, threads, *arguments):
        assert blocks > 0
        assert 0 < threads <= 1024

    def blocks_per_sm(self, threads):
        return 2048 // threads


class StandIn(Bench):
    """A bench that passes for a GPU's: its kernels do nothing, its clock always shows the same."""

    on_gpu = True
    chip = SimpleNamespace(
        multi_processor_count=4, max_threads_per_multi_processor=2048, L2_cache_size=2**10, name="stand-in"
    )

    def __init__(self, **given):
        super().__init__(torch.device("cpu"), quick=True, **given)

    def needs_gpu(self, what):
        pass

    def cuda_kernels(self, source, name, kernels, **defines):
        assert all(re.search(rf"\b{define}\b", source) for define in defines)
        return [StandInKernel() for _ in kernels]

    def time(self, run, **given):
        run()
        return Timed(**timed(1e6))
