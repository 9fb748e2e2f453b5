"""What this machine can do, what to do about what it cannot, and how fast it is at most."""

import os

from flopwise.capture.doctor import Check, examine
from flopwise.capture.doctor import busy as busy_with
from flopwise.capture.isolate import OnEvent, Worker
from flopwise.predict.calibration import ceilings
from flopwise.records.ceilings import Ceilings
from flopwise.spec.gpu import find_gpu
from flopwise.store.ceilings import check_writable, save_ceilings


def doctor() -> list[Check]:
    """Look at Python, torch, Triton, the GPUs, nsys and what else runs here.

    >>> [check.name for check in flopwise.doctor()]        # doctest: +SKIP
    ['python', 'torch', 'triton', 'device', 'nsys', 'switches', 'cpu']
    """
    return examine()


def busy() -> str:
    """A warning where other work on this machine would be in what is measured now; else empty."""
    return busy_with(os.cpu_count() or 1)


def calibrate(device: str = "auto", *, on_event: OnEvent = lambda event: None) -> Ceilings:
    """Probe the device for about a minute; `account` and `roofline` use what was measured from then on.

    >>> flopwise.calibrate().bandwidth_bytes_per_s          # doctest: +SKIP
    4.1e12
    """
    check_writable()
    with Worker() as worker:
        seen = worker.look(device)
        there, name = seen.environment, seen.device
        probes = worker.calibrate(name, on_event)
    gpu = there.gpu if not name.startswith("cpu") else None
    known = find_gpu(gpu.name) if gpu is not None else None  # by our name --gpu finds it; else by the driver's
    found = ceilings(
        probes,
        gpu=known.name if known is not None else gpu.name if gpu is not None else "cpu",
        processors=gpu.sm_count if gpu is not None else max(1, there.cpu_threads),
        versions={"torch": there.torch, "cuda": there.cuda, "driver": there.gpu.driver if there.gpu else ""},
        asynchronous=gpu is not None,
    )
    save_ceilings(found)
    return found
