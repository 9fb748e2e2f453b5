"""rocprofv3 files as its documented schema has them: one process, one or more GPUs, launches that their kernels follow."""

import copy
import json
from pathlib import Path
from typing import Any

KINDS = [  # as `strings.buffer_records` lists them: a record's kind is its place here, its operation the place in the list
    {"kind": "NONE", "operations": []},
    {
        "kind": "HIP_RUNTIME_API",
        "operations": ["hipLaunchKernel", "hipMemcpyAsync", "hipDeviceSynchronize", "hipGraphLaunch"],
    },
    {"kind": "MARKER_CORE_API", "operations": ["roctxMarkA", "roctxRangePushA"]},
    {
        "kind": "MEMORY_COPY",
        "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE", "MEMORY_COPY_DEVICE_TO_HOST"],
    },
    {"kind": "KERNEL_DISPATCH", "operations": ["KERNEL_DISPATCH_NONE", "KERNEL_DISPATCH_COMPLETE"]},
]
HIP, MARKER, COPY, KERNEL = 1, 2, 3, 4
CPU_AGENT, FIRST_GPU_AGENT = 100, 200
SYMBOLS = {
    1: ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x1_SN", "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x1_SN"),
    2: ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bLi64EEEvPT_.kd", ""),
    3: (
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEviT0_.kd",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int, at::native::FillFunctor<float>)",
    ),
}


def agent(handle: int, kind: int, **facts: Any) -> dict[str, Any]:
    return {"size": 424, "id": {"handle": handle}, "type": kind, **facts}


def mi300x(place: int = 0, product: str = "AMD Instinct MI300X") -> dict[str, Any]:
    banks = [{"heap_type": 1, "size_in_bytes": 206141652992}]
    facts = {
        "name": "gfx942",
        "product_name": product,
        "cu_count": 304,
        "mem_banks": banks,
        "logical_node_type_id": place,
    }
    return agent(FIRST_GPU_AGENT + place, 2, **facts)


def record(
    kind: int, operation: int, start: int, end: int, correlation: int, thread: int = 7, **more: Any
) -> dict[str, Any]:
    ids = {"internal": correlation, "external": 0}
    common = {"size": 64, "kind": kind, "operation": operation, "thread_id": thread, "correlation_id": ids}
    return {**common, "start_timestamp": start, "end_timestamp": end, **more}


def dispatch(start: int, end: int, correlation: int, kernel: int, gpu: int = 0, queue: int = 11) -> dict[str, Any]:
    info = {
        "size": 80,
        "agent_id": {"handle": FIRST_GPU_AGENT + gpu},
        "queue_id": {"handle": queue},
        "kernel_id": kernel,
        "dispatch_id": correlation,
        "workgroup_size": {"x": 256, "y": 1, "z": 1},
        "grid_size": {"x": 4096, "y": 1, "z": 1},
    }
    return record(KERNEL, 1, start, end, correlation, dispatch_info=info)


def rocprof_file(steps: int = 3, start: int = 10**15, gpus: int = 1) -> dict[str, Any]:
    """Steps of a copy, three kernels and a synchronisation, each in a ROCTx range `step N`; 1 ms each."""
    kernels, calls, copies, markers, messages = [], [], [], [], []
    correlation = 1
    for step in range(steps):
        at = start + step * 1_000_000
        markers.append(record(MARKER, 1, at, at + 950_000, correlation))
        messages.append({"key": correlation, "value": f"step {step}"})
        correlation += 1
        calls.append(record(HIP, 1, at + 1_000, at + 5_000, correlation))
        there = {"dst_agent_id": {"handle": FIRST_GPU_AGENT}, "src_agent_id": {"handle": CPU_AGENT}, "bytes": 4096}
        copies.append(record(COPY, 1, at + 6_000, at + 16_000, correlation, **there))
        for number in SYMBOLS:
            correlation += 1
            launched = at + 10_000 * (number + 1)
            calls.append(record(HIP, 0, launched, launched + 4_000, correlation))
            begun = at + 50_000 + 200_000 * (number - 1)
            kernels.append(dispatch(begun, begun + 190_000, correlation, number, gpu=step % gpus))
        correlation += 1
        calls.append(record(HIP, 2, at + 600_000, at + 900_000, correlation))
        correlation += 1
    symbols = [
        {
            "size": 80,
            "kernel_id": number,
            "kernel_name": name,
            "demangled_kernel_name": text,
            "formatted_kernel_name": name,
        }
        for number, (name, text) in SYMBOLS.items()
    ]
    process = {
        "metadata": {"pid": 4242, "init_time": start - 10**9, "fini_time": start + 10**9},
        "agents": [agent(CPU_AGENT, 1, name="AMD EPYC 9654"), *(mi300x(place) for place in range(gpus))],
        "counters": [],
        "strings": {
            "callback_records": [],
            "buffer_records": copy.deepcopy(KINDS),
            "marker_api": messages,
            "counters": {"dimension_ids": []},
        },
        "code_objects": [],
        "kernel_symbols": [{}, *symbols],
        "callback_records": {"counter_collection": []},
        "buffer_records": {"kernel_dispatch": kernels, "hip_api": calls, "memory_copy": copies, "marker_api": markers},
    }
    return {"rocprofiler-sdk-tool": [process]}


def write_rocprof(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path
