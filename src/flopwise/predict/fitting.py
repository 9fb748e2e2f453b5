"""Whether a workload will fit, told before it is run. No torch, no time to speak of."""

from flopwise import units
from flopwise.predict.dry_step import needs_dry_run
from flopwise.predict.fit import peak_of
from flopwise.predict.shapes.step import workspace_bytes
from flopwise.records.events import DeviceInfo
from flopwise.records.run import Environment
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.workload import Workload

_THREADS = {"forward": 1}  # with a cuBLAS workspace each; two where there is a backward pass


def gpu_of(environment: Environment | None) -> Gpu | None:
    """The GPU that a point ran on, if it is one we know; the CPU, if there is none; None: nobody knows."""
    if environment is None:
        return None
    return gpu_named("cpu") if environment.gpu is None else find_gpu(environment.gpu.name)


def too_large(workload: Workload, there: DeviceInfo) -> str:
    """The line that warns of a workload that will not fit; '' if it will, or if that cannot be told in a moment.

    The peak is the closed form's, which errs by a few per cent and knows eager steps only: a note, not a refusal.

    >>> from flopwise.spec.workload import workload
    >>> there = DeviceInfo(environment=Environment(flopwise="", python="", torch=""), device="cpu", free_bytes=2**33)
    >>> too_large(workload("tiny"), there), too_large(workload("xl"), there).partition(": ")[2]
    ('', 'predicted peak 37.4 GiB of 8.00 GiB free: it will probably run out of memory')
    """
    if needs_dry_run(workload) or there.free_bytes is None or workload.recipe.compile != "off":
        return ""
    on_cpu = there.environment.gpu is None
    needed = peak_of(workload, None if on_cpu else gpu_of(there.environment))
    if on_cpu:
        needed -= _THREADS.get(workload.phase, 2) * workspace_bytes(None)
    if needed <= there.free_bytes:
        return ""
    return (
        f"{workload.label()}: predicted peak {units.size(needed)} of {units.size(there.free_bytes)} free: "
        "it will probably run out of memory"
    )
