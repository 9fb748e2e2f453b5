"""NVML beside a measurement: clocks, power, temperature and why the GPU slowed down. No torch here.

It runs in the process that waits, not in the one that is measured, so that it takes no time from the step.
"""

import threading
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from flopwise.records.run import Telemetry

TICK_S = 0.1
# nvmlClocksEventReasons: bits as NVML documents them; idle (bit 0) and application clocks (bit 1) are no throttling.
_REASONS = {
    0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "hardware power brake", 0x100: "display clock",
}  # fmt: skip


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
        at, sm, memory, power, temperature, load = zip(*self._ticks, strict=True)
        return Telemetry(
            at_ns=at, sm_mhz=sm, memory_mhz=memory, power_mw=power, temperature_c=temperature, utilisation=load,
            throttle=tuple(self._reasons),
        )  # fmt: skip

    def _read(self) -> None:
        assert self._nvml is not None
        n, handle, begun = self._nvml, self._handle, time.monotonic_ns()
        while not self._over.wait(TICK_S):
            try:
                self._ticks.append(
                    (
                        time.monotonic_ns() - begun,
                        n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
                        n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
                        n.nvmlDeviceGetPowerUsage(handle),
                        n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
                        n.nvmlDeviceGetUtilizationRates(handle).gpu,
                    )
                )
                bits = n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                self._reasons |= dict.fromkeys(name for bit, name in _REASONS.items() if bits & bit)
            except n.NVMLError:
                return


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
            bits = n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            states.append(
                GpuState(
                    index=index,
                    name=str(n.nvmlDeviceGetName(handle)),
                    sm_mhz=n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
                    max_sm_mhz=n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM),
                    memory_mhz=n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
                    temperature_c=n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
                    power_w=n.nvmlDeviceGetPowerUsage(handle) / 1000,
                    power_limit_w=n.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
                    throttle=tuple(name for bit, name in _REASONS.items() if bits & bit),
                    processes=tuple(p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(handle)),
                )
            )
        except n.NVMLError:
            continue  # a GPU that will not answer (MIG, permissions) is left out
    return states
