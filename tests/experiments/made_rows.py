"""Rows for the tests of experiments, as they are stored."""

import msgspec
import torch

from flopwise.experiments.bench import Bench


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
