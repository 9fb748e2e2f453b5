"""How much memory there is for a workload, and no more than that on the CPU."""

import resource

import torch


def memory_bytes(device: torch.device) -> int:
    """What a workload may take on the device: the GPU's memory, or what the system has free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 2**63


def free_bytes(device: torch.device) -> int | None:
    """What is free on the device now; None where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    there = memory_bytes(device)
    return there if there < 2**60 else None


def limit_memory() -> None:
    """On the CPU, let an absurd size fail in this process rather than wake the system's OOM killer."""
    limit = int(0.95 * memory_bytes(torch.device("cpu")))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if limit < 2**60:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
