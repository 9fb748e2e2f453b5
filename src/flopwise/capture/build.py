"""A workload becomes a step on a device."""

import re

import torch

from flopwise.capture.collective_step import collective_step
from flopwise.capture.compared_steps import StepFollower
from flopwise.capture.model_step import model_step
from flopwise.capture.op_step import op_step
from flopwise.capture.parallel_step import parallel_step
from flopwise.capture.step import Step, captured, recorded
from flopwise.capture.user_step import user_step
from flopwise.errors import FlopwiseError, one_line
from flopwise.spec.model import ModelSpec
from flopwise.spec.operations import OpSpec
from flopwise.spec.recipe import REPLAYED
from flopwise.spec.workload import UserStep, Workload


def build_step(workload: Workload, device: torch.device, follower: StepFollower | None = None) -> Step:
    """Build the workload on the device. Random numbers come from a fixed seed. `follower` sees it from its first run on."""
    torch.manual_seed(0)
    makers = {ModelSpec: model_step, OpSpec: op_step, UserStep: user_step}
    if workload.many:
        return (collective_step if isinstance(workload.subject, OpSpec) else parallel_step)(workload, device)
    step = makers[type(workload.subject)](workload, device)
    recipe = workload.recipe
    ahead = captured if recipe.graph == "on" else recorded if recipe.compile == REPLAYED else None
    if follower is None:
        return ahead(step, device) if ahead is not None else step
    follower.begin(step)
    if ahead is not None:
        step = ahead(step, device, follower.once)
        follower.begin(step)
    return step


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device of this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise FlopwiseError(f"device = '{one_line(name, 40)}' is not a device", "use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA GPU here"
        raise FlopwiseError(
            f"device = '{name}' is not available: {reason}", "use --device cpu, or see `flopwise doctor`"
        )
    device, count = torch.device(name if ":" in name else "cuda:0"), torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise FlopwiseError(f"device = '{name}' is not available", f"GPUs here: cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(device)
    return device
