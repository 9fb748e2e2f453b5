"""What machine this is: enough to tell whether two runs may be compared, and nothing private."""

import os
import platform
import subprocess
from importlib import metadata

import torch

from flopwise.capture.functions import NODE
from flopwise.capture.telemetry import driver_version
from flopwise.records.events import DeviceInfo
from flopwise.records.run import Environment, Gpu
from flopwise.version import __version__

# Variables that change speed or results. Others are never read: an environment holds secrets.
SWITCHES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUDA_SCALE_LAUNCH_QUEUES",
)


def device_info(device: torch.device, free_bytes: int | None = None) -> DeviceInfo:
    """The event that says where a measurement runs."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""  # NVML's name of it
    return DeviceInfo(environment=environment(device), device=str(device), gpu_uuid=uuid, free_bytes=free_bytes)


def environment(device: torch.device) -> Environment:
    """The hardware, the software and the commit of a measurement on the device."""
    commit, dirty = _git()
    return Environment(
        flopwise=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        triton=_version("triton"),
        os=f"{platform.system()} {platform.release()}",
        cpu=_cpu_name(),
        cpu_cores=os.cpu_count() or 0,
        cpu_threads=torch.get_num_threads(),
        local_ranks=_local_ranks(),
        gpu=_gpu(device) if device.type == "cuda" else None,
        git_commit=commit,
        git_dirty=dirty,
        switches={name: os.environ[name] for name in SWITCHES if name in os.environ},
        host=os.environ.get(NODE, ""),
    )


def _local_ranks() -> int:
    """As torchrun says."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        capability=f"{properties.major}.{properties.minor}",
        driver=driver_version(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def _git() -> tuple[str, bool]:
    """The commit of the working directory, if it is in a repository."""
    try:
        commit, status = (
            subprocess.run(("git", *words), capture_output=True, text=True, timeout=5, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.SubprocessError):
        return "", False
    return commit, bool(status)
