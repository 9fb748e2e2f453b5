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


class Check(msgspec.Struct, frozen=True):
    """One line of `flopwise doctor`."""

    name: str
    state: str
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """Look at everything once; nothing is changed."""
    python = Check("python", GOOD, f"{sys.version.split()[0]} ({sys.executable})")
    try:
        with Worker() as worker:
            seen = worker.look("auto")
            environment, device = seen.environment, seen.device
    except FlopwiseError as error:
        return [python, Check("torch", MISSING, error.message, error.hint), nsys(), *_gpus()]
    gpu = Check("device", GOOD, _device(environment, device))
    software = [python, _torch(environment), _triton(environment, device), gpu]
    return [*software, *_gpus(), nsys(), _switches(environment), _cpu(environment)]


def nsys() -> Check:
    """Nsight Systems: on the PATH, or where its installers put it."""
    program = find_nsys()
    advice = "only `profile --with nsys` needs it; NVIDIA's nsight-systems-cli package has it"
    if not program:
        return Check("nsys", ADVICE, "not installed", advice)
    try:
        version = nsys_version(program)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("nsys", ADVICE, f"{program} does not run: {one_line(str(error), 120)}", advice)
    return Check("nsys", GOOD, f"{one_line(version)} ({program})")


def _torch(environment: Environment) -> Check:
    if _version(environment.torch) < _OLDEST_TORCH:
        return Check("torch", ADVICE, environment.torch, "flopwise is tested with torch 2.11 and later")
    built = f"CUDA {environment.cuda}" if environment.cuda else "built without CUDA"
    return Check("torch", GOOD, f"{environment.torch}, {built}")


def _triton(environment: Environment, device: str) -> Check:
    needed = "torch.compile on a GPU needs it: pip install 'flopwise[torch]'"
    if not environment.triton:
        return Check("triton", MISSING if device != "cpu" else ADVICE, "not installed", needed)
    old = _version(environment.triton) < _OLDEST_TRITON
    return Check("triton", ADVICE if old else GOOD, environment.triton, needed if old else "")


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
    return [check for gpu in gpu_states() for check in (_clocks(gpu), _other_processes(gpu))]


def _clocks(gpu: GpuState) -> Check:
    name = f"gpu {gpu.index} clocks"
    power = f"{gpu.temperature_c} °C, {gpu.power_w:.0f} of {gpu.power_limit_w:.0f} W"
    clocks = f"SM clock {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz, memory {gpu.memory_mhz} MHz, {power}"
    if not gpu.throttle:
        return Check(name, GOOD, clocks)
    advice = "let it cool, or measure when its power is not capped"
    return Check(name, ADVICE, f"{clocks}; slowed by: {', '.join(gpu.throttle)}", advice)


def _other_processes(gpu: GpuState) -> Check:
    name, others = f"gpu {gpu.index} others", [p for p in gpu.processes if p != os.getpid()]
    if not others:
        return Check(name, GOOD, "no other process on the GPU")
    found = f"{len(others)} other process(es) on the GPU: pid {', '.join(map(str, others[:5]))}"
    return Check(name, ADVICE, found, "their work is in your timings: wait, or use another GPU")


def _switches(environment: Environment) -> Check:
    if not environment.switches:
        return Check("switches", GOOD, "no environment variable that changes speed is set")
    found = ", ".join(f"{name}={one_line(value, 60)}" for name, value in environment.switches.items())
    advice = "these change speed or precision; they are recorded with every point"
    return Check("switches", ADVICE, found, advice)


def busy(cores: int) -> str:
    """The warning about other work on this machine; '' where its load is below half its cores.

    >>> busy(10**9)
    ''
    """
    load = os.getloadavg()[0]
    if load <= 0.5 * max(1, cores):
        return ""
    return f"other work runs here (load {load:.1f} on {cores} cores): launch times and CPU timings will be noisy"


def _cpu(environment: Environment) -> Check:
    cores, threads, load = environment.cpu_cores, environment.cpu_threads, os.getloadavg()[0]
    found = f"{environment.cpu}, {cores} cores, torch uses {threads} threads, load {load:.1f}"
    warning = busy(cores)
    return Check("cpu", ADVICE if warning else GOOD, found, warning)
