"""What this machine can do: each check with what was found and what to do about it. No torch here: the worker has it."""

import os
import subprocess
import sys

import msgspec

from flopwise import units
from flopwise.capture.isolate import Worker
from flopwise.capture.nsys_program import find_nsys, nsys_version
from flopwise.capture.telemetry import GpuState, gpu_states
from flopwise.errors import FlopwiseError, one_line
from flopwise.records.run import Environment

GOOD, ADVICE, MISSING = "ok", "note", "missing"
_OLDEST_TORCH, _OLDEST_TRITON = (2, 11), (3, 6)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `flopwise doctor`."""

    name: str
    state: str
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """Look at everything once; nothing is changed."""
    try:
        with Worker() as worker:
            seen = worker.look("auto")
            environment, device = seen.environment, seen.device
    except FlopwiseError as error:
        return [_python(), Check(name="torch", state=MISSING, found=error.message, advice=error.hint), nsys(), *_gpus()]
    return [
        _python(),
        _torch(environment),
        _triton(environment, device),
        Check(name="device", state=GOOD, found=_device(environment, device)),
        *_gpus(),
        nsys(),
        _switches(environment),
        _cpu(environment),
    ]


def nsys() -> Check:
    """Nsight Systems: on the PATH, or where its installers put it."""
    found = find_nsys()
    advice = "only `profile --with nsys` needs it; NVIDIA's nsight-systems-cli package has it"
    if not found:
        return Check(name="nsys", state=ADVICE, found="not installed", advice=advice)
    try:
        said = nsys_version(found)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(
            name="nsys", state=ADVICE, found=f"{found} does not run: {one_line(str(error), 120)}", advice=advice
        )
    return Check(name="nsys", state=GOOD, found=f"{one_line(said)} ({found})")


def _python() -> Check:
    return Check(name="python", state=GOOD, found=f"{sys.version.split()[0]} ({sys.executable})")


def _torch(environment: Environment) -> Check:
    if _version(environment.torch) < _OLDEST_TORCH:
        return Check(
            name="torch", state=ADVICE, found=environment.torch, advice="flopwise is tested with torch 2.11 and later"
        )
    built = f"CUDA {environment.cuda}" if environment.cuda else "built without CUDA"
    return Check(name="torch", state=GOOD, found=f"{environment.torch}, {built}")


def _triton(environment: Environment, device: str) -> Check:
    needed = "torch.compile on a GPU needs it: pip install 'flopwise[torch]' -c constraints.txt"
    if not environment.triton:
        return Check(name="triton", state=MISSING if device != "cpu" else ADVICE, found="not installed", advice=needed)
    old = _version(environment.triton) < _OLDEST_TRITON
    return Check(name="triton", state=ADVICE if old else GOOD, found=environment.triton, advice=needed if old else "")


def _version(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _device(environment: Environment, device: str) -> str:
    gpu = environment.gpu
    if gpu is None:
        return f"{device}: no CUDA GPU is seen; everything but GPU timing works on the CPU"
    shape = f"{units.size(gpu.memory_bytes)}, {gpu.sm_count} SMs, capability {gpu.capability}"
    return f"{device}: {gpu.name}, {shape}, driver {gpu.driver}"


def _gpus() -> list[Check]:
    return [check for gpu in gpu_states() for check in _gpu(gpu)]


def _gpu(gpu: GpuState) -> list[Check]:
    name = f"gpu {gpu.index}"
    power = f"{gpu.temperature_c} °C, {gpu.power_w:.0f} of {gpu.power_limit_w:.0f} W"
    clocks = f"SM clock {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz, memory {gpu.memory_mhz} MHz, {power}"
    checks = [Check(name=f"{name} clocks", state=GOOD, found=clocks)]
    if gpu.throttle:
        checks = [
            Check(
                name=f"{name} clocks",
                state=ADVICE,
                found=f"{clocks}; slowed by: {', '.join(gpu.throttle)}",
                advice="let it cool, or measure when its power is not capped",
            )
        ]
    others = [p for p in gpu.processes if p != os.getpid()]
    if others:
        found = f"{len(others)} other process(es) on the GPU: pid {', '.join(map(str, others[:5]))}"
        return [
            *checks,
            Check(
                name=f"{name} others",
                state=ADVICE,
                found=found,
                advice="their work is in your timings: wait, or use another GPU",
            ),
        ]
    return [*checks, Check(name=f"{name} others", state=GOOD, found="no other process on the GPU")]


def _switches(environment: Environment) -> Check:
    if not environment.switches:
        return Check(name="switches", state=GOOD, found="no environment variable that changes speed is set")
    found = ", ".join(f"{name}={one_line(value, 60)}" for name, value in environment.switches.items())
    return Check(
        name="switches",
        state=ADVICE,
        found=found,
        advice="these change speed or precision; they are recorded with every point",
    )


def busy(cores: int) -> str:
    """What to say of a machine on which other work runs; empty where its load is below half its cores.

    >>> busy(10**9)
    ''
    """
    load = os.getloadavg()[0]
    if load <= 0.5 * max(1, cores):
        return ""
    return f"other work runs here (load {load:.1f} on {cores} cores): launch times and CPU timings will be noisy"


def _cpu(environment: Environment) -> Check:
    load = os.getloadavg()[0]
    found = f"{environment.cpu}, {environment.cpu_cores} cores, torch uses {environment.cpu_threads} threads, load {load:.1f}"
    if said := busy(environment.cpu_cores):
        return Check(name="cpu", state=ADVICE, found=found, advice=said)
    return Check(name="cpu", state=GOOD, found=found)
