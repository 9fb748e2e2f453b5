"""What the GPUs of a trace are called: by the name that the file gives, else by their size."""

from collections.abc import Mapping
from dataclasses import dataclass

from flopwise import units
from flopwise.errors import one_line
from flopwise.records.note import Note
from flopwise.spec.gpu import Gpu, find_gpu, gpus_of_size
from flopwise.trace.tables import NO_ID, DeviceName

MOST_GPUS = 1024  # of a file that are read
_ALIKE = 1.2  # the rates of GPUs of one size: further apart, the size does not tell which it is


@dataclass(frozen=True)
class Described:
    """A GPU as a file describes it."""

    name: str = ""
    processors: int = 0
    memory_bytes: int = 0
    capability: str | None = None  # CUDA's, '' of AMD, None where the file does not say


def device_name(gpu: Described) -> DeviceName:
    """Its name; where it has none, or one that no GPU is known by, what its size tells, with a note.

    >>> device_name(Described("NVIDIA H200", 132, 150109880320)).name
    'NVIDIA H200'
    """
    name = one_line(gpu.name)
    alike = gpus_of_size(gpu.processors, gpu.memory_bytes, gpu.capability) if find_gpu(gpu.name) is None else ()
    if not alike:
        return DeviceName(name)
    called = f"calls its GPU '{name}'" if name else "does not name its GPU"
    kind = "compute units" if alike[0].capability == "" else "SMs"
    size = f"{gpu.processors} {kind} and {units.size(gpu.memory_bytes)}"
    titles = [one.title for one in alike]
    if any(_apart(alike[0], one) for one in alike):
        which = f"{', '.join(titles[:-1])} or {titles[-1]}"
        return DeviceName(
            name, Note("gpu_unsure", f"the trace {called}; by its {size} it is {which}: --gpu says which")
        )
    others = f", but {' and '.join(titles[1:])} have as many: --gpu names it" if len(titles) > 1 else ""
    guess = f"the trace {called}; by its {size} it is taken for {titles[0]}{others}"
    return DeviceName(titles[0], Note("gpu_by_size", guess))


def _apart(one: Gpu, other: Gpu) -> bool:
    """Whether two GPUs have other precisions, or rates that are far apart."""
    if one.peaks.keys() != other.peaks.keys():
        return True
    return any(not 1 / _ALIKE < one.peaks[dtype] / other.peaks[dtype] < _ALIKE for dtype in one.peaks)


def name_on(gpus: Mapping[tuple[int, int], DeviceName], device: int, process: int) -> DeviceName:
    """The GPU that a process calls `device`; where the file does not list it, what all of those listed are called."""
    found = gpus.get((process, device)) or gpus.get((NO_ID, device))
    if found is not None:
        return found
    names = {one.name: one for one in gpus.values()}
    return next(iter(names.values())) if len(names) == 1 else DeviceName()
