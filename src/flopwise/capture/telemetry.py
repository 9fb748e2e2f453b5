"""NVML during a measurement: clocks, power, temperature and why the GPU slowed down. No torch here.

It runs in the process that waits, not in the one that is measured, so that it takes no time from the step.
"""

import threading
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from flopwise.records.run import Telemetry

TICK_S = 0.1
_COLUMNS = ("at_ns", "sm_mhz", "memory_mhz", "power_mw", "temperature_c", "utilisation")
# nvmlClocksEventReasons: bits as NVML documents them; idle (bit 0) and application clocks (bit 1) are no throttling.
_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock",
}


def _nvml() -> Any | None:
    """NVML, initialised; None where there is no driver or no binding."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  a missing library and a missing driver are one fact: no telemetry
        return None
    return pynvml


def driver_version() -> str:
    """The NVIDIA driver's version, or ''."""
    nvml = _nvml()
    return str(nvml.nvmlSystemGetDriverVersion()) if nvml else ""


class Watch:
    """Reads one GPU's sensors every tenth of a second until it is closed."""

    def __init__(self, gpu_uuid: str) -> None:
        self._nvml = _nvml() if gpu_uuid else None
        self._handle = self._find(gpu_uuid)
        self._ticks: list[tuple[int, ...]] = []
        self._reasons: dict[str, None] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _find(self, gpu_uuid: str) -> Any | None:
        if self._nvml is None:
            return None
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        except self._nvml.NVMLError:
            return None

    def __enter__(self) -> Self:
        if self._handle is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._handle is not None:
            self._thread.join(timeout=2)

    def telemetry(self) -> Telemetry | None:
        """What was read so far; None where there is nothing to read."""
        if not self._ticks:
            return None
        columns = dict(zip(_COLUMNS, zip(*self._ticks, strict=True), strict=True))
        return Telemetry(**columns, throttle=tuple(self._reasons))

    def _read(self) -> None:
        assert self._nvml is not None
        n, handle, begun = self._nvml, self._handle, time.monotonic_ns()
        while not self._over.wait(TICK_S):
            try:
                load = n.nvmlDeviceGetUtilizationRates(handle).gpu
                self._ticks.append((time.monotonic_ns() - begun, *_sensors(n, handle), load))
                self._reasons |= dict.fromkeys(_throttle(n, handle))
            except n.NVMLError:
                return


def _sensors(n: Any, handle: Any) -> tuple[int, int, int, int]:
    """The SM and memory clocks in MHz, the power in mW and the temperature in °C."""
    clocks = [n.nvmlDeviceGetClockInfo(handle, clock) for clock in (n.NVML_CLOCK_SM, n.NVML_CLOCK_MEM)]
    temperature = n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)
    return clocks[0], clocks[1], n.nvmlDeviceGetPowerUsage(handle), temperature


def _throttle(n: Any, handle: Any) -> tuple[str, ...]:
    """Why the GPU is slower than it could be."""
    bits = n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at this moment."""

    index: int
    name: str
    sm_mhz: int
    max_sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    power_limit_w: float
    throttle: tuple[str, ...]
    processes: tuple[int, ...]


def gpu_states() -> list[GpuState]:
    """Every GPU the driver knows, in its order; none where there is no driver."""
    n = _nvml()
    if n is None:
        return []
    states = []
    for index in range(n.nvmlDeviceGetCount()):
        handle = n.nvmlDeviceGetHandleByIndex(index)
        try:
            sm, memory, power, temperature = _sensors(n, handle)
            states.append(
                GpuState(
                    index=index,
                    name=str(n.nvmlDeviceGetName(handle)),
                    sm_mhz=sm,
                    max_sm_mhz=n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM),
                    memory_mhz=memory,
                    temperature_c=temperature,
                    power_w=power / 1000,
                    power_limit_w=n.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
                    throttle=_throttle(n, handle),
                    processes=tuple(p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(handle)),
                )
            )
        except n.NVMLError:
            continue  # a GPU that will not answer (MIG, permissions) is left out
    return states
