"""GPUs by their names: ours, those that drivers print, and what a trace says where it names none."""

import re
from functools import lru_cache

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.gpu_facts import PEAK_DTYPES as PEAK_DTYPES
from flopwise.spec.gpu_facts import Gpu as Gpu
from flopwise.spec.gpu_table import ALIASES, GPUS

# A driver's memory over the datasheet's: up to 7.5 % more, as datasheets count in 10⁹ bytes and chips in 2³⁰; a few
# per cent less where error correction takes its part.
_MEMORY_SHOWN = (0.95, 1.08)
_LONGEST = 200  # letters of a driver's name for a GPU: what is longer is none, and takes long to compare


def gpu_names() -> tuple[str, ...]:
    """Every GPU known by name.

    >>> gpu_names()[:2]
    ('a100', 'a100-40')
    """
    return tuple(one.name for one in GPUS)


def gpu(name: str) -> Gpu:
    """The GPU of this name: ours (`h100`), or the one a driver prints.

    >>> gpu("NVIDIA H100 80GB HBM3").name, gpu("NVIDIA A100-SXM4-80GB").name, gpu("RTX 4090").name
    ('h100', 'a100', 'rtx4090')
    """
    fields.text("gpu", name)
    found = find_gpu(name)
    if found is None:
        raise FlopwiseError(
            f"there is no GPU {fields.show(name)}",
            f"{fields.did_you_mean(name.lower(), (*gpu_names(), *ALIASES))}known: {', '.join(gpu_names())}",
        )
    return found


@lru_cache(maxsize=256)  # a sweep asks for every point
def find_gpu(name: str) -> Gpu | None:
    """As `gpu`, or None.

    >>> find_gpu("Voodoo 2") is None
    True
    """
    if len(name) > _LONGEST:
        return None
    word = " ".join(name.lower().split())
    key = ALIASES.get(word.replace(" ", "-"), word.replace(" ", "-"))
    exact = next((one for one in GPUS if one.name == key or one.title.lower() == word), None)
    if exact is not None:
        return exact
    model = re.sub(r"^(nvidia|tesla|amd|graphics device)\s+", "", re.sub(r"^nvidia\s+", "", word))
    return next((one for one in GPUS if any(re.fullmatch(d, model) for d in one.drivers)), None)


def gpus_of_size(processors: int, memory_bytes: int, capability: str | None = None) -> tuple[Gpu, ...]:
    """The GPUs with so many SMs (compute units) and so much memory as a driver counts it.

    `capability`: CUDA's, '' of AMD, None where it is not known.

    >>> [one.name for one in gpus_of_size(304, 206141652992)], [one.name for one in gpus_of_size(108, 42297524224, "8.0")]
    (['mi300x'], ['a100-40', 'a100-pcie-40'])
    """
    low, high = _MEMORY_SHOWN
    alike = (one for one in GPUS if one.sms == processors and capability in (None, one.capability))
    return tuple(one for one in alike if low <= memory_bytes / (one.memory_bytes or 1) <= high)
