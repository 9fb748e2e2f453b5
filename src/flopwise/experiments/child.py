"""An experiment in its own process: reports its place, what it does, and each row. [torch]"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from flopwise.capture.build import resolve_device
from flopwise.capture.environment import environment
from flopwise.capture.memory_limit import limit_memory
from flopwise.experiments.bench import Bench
from flopwise.experiments.catalog import experiments
from flopwise.records.events import ExperimentProgress, ExperimentRequest
from flopwise.records.experiment import Place


def run_experiment(asked: ExperimentRequest, report: Callable[[ExperimentProgress], None]) -> None:
    """Run the experiment."""
    device = resolve_device(asked.device)
    if device.type == "cpu":
        limit_memory()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    report(ExperimentProgress(place=Place(device=str(device), environment=environment(device), load=load)))
    torch.manual_seed(0)
    bench = Bench(
        device, asked.quick, asked.workload, Path(asked.folder), lambda text: report(ExperimentProgress(doing=text))
    )
    for row in experiments()[asked.experiment].measure(bench):
        report(ExperimentProgress(row=msgspec.to_builtins(row)))
