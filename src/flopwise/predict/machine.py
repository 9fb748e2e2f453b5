"""The machine that a step is predicted for: a GPU's facts, and its ceilings."""

import msgspec

from flopwise.predict.datasheet import from_datasheet
from flopwise.records.ceilings import Ceilings
from flopwise.records.run import Environment
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.store.ceilings import load_ceilings


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step runs. Without ceilings it has no predicted time; without a GPU it is one of Hopper's kind."""

    gpu: Gpu | None = None
    ceilings: Ceilings | None = None

    @property
    def is_cpu(self) -> bool:
        return self.gpu is not None and self.gpu.name == "cpu"


def machine_with(gpu: Gpu | None) -> Machine:
    """The machine with this GPU, and what is known of its ceilings."""
    return Machine(gpu=gpu, ceilings=find_ceilings(gpu) if gpu is not None else None)


def find_ceilings(gpu: Gpu) -> Ceilings | None:
    """A GPU's ceilings: measured on this machine if it was calibrated, else from the datasheet, if it says enough."""
    measured = load_ceilings(gpu.name)
    return measured or (from_datasheet(gpu) if "fp32" in gpu.peaks else None)


def gpu_of(environment: Environment | None) -> Gpu | None:
    """The GPU that a point ran on, if it is one we know; the CPU, if there is none; None: not known."""
    if environment is None:
        return None
    return gpu_named("cpu") if environment.gpu is None else find_gpu(environment.gpu.name)
