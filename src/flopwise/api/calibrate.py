"""Measure a machine's ceilings, once, so that steps on it can be predicted."""

from flopwise.capture.isolate import OnEvent, Worker
from flopwise.predict.calibration import ceilings
from flopwise.records.ceilings import Ceilings
from flopwise.records.run import Environment
from flopwise.spec.gpu import find_gpu
from flopwise.store.ceilings import check_writable, save_ceilings


def calibrate(device: str = "auto", *, on_event: OnEvent = lambda event: None) -> Ceilings:
    """Probe the device for about a minute; `account` and `roofline` use what was found from then on.

    >>> flopwise.calibrate().bandwidth_bytes_per_s          # doctest: +SKIP
    4.1e12
    """
    check_writable()
    with Worker() as worker:
        seen = worker.look(device)
        there, name = seen.environment, seen.device
        probes = worker.calibrate(name, on_event)
    on_gpu = there.gpu is not None and not name.startswith("cpu")
    found = ceilings(
        probes,
        gpu=_name(there) if on_gpu else "cpu",
        processors=there.gpu.sm_count if there.gpu is not None and on_gpu else max(1, there.cpu_threads),
        versions={"torch": there.torch, "cuda": there.cuda, "driver": there.gpu.driver if there.gpu else ""},
        asynchronous=on_gpu,
    )
    save_ceilings(found)
    return found


def _name(there: Environment) -> str:
    """The name in `spec/gpu.py`, so that --gpu finds it; the driver's own for a GPU that has none there."""
    assert there.gpu is not None
    known = find_gpu(there.gpu.name)
    return known.name if known else there.gpu.name
