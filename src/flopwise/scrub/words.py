"""The keys and words that a scrubbed PyTorch trace may keep where users do not write: whatever is not here is not copied."""

import re

_TOP_LEVEL = (
    "schemaVersion displayTimeUnit baseTimeNanoseconds cupti_version cuda_runtime_version cuda_driver_version "
    "hip_runtime_version hip_driver_version record_shapes profile_memory with_stack with_flops with_modules"
)
TOP_LEVEL = frozenset(_TOP_LEVEL.split())
_ARGS = (
    "External id, Ev Idx, Record function id, Sequence number, Fwd thread id, Input Dims, Input type, Input Strides, "
    "Concrete Inputs, device, context, stream, correlation, queued, registers per thread, shared memory, blocks per SM, "
    "warps per SM, grid, block, est. achieved occupancy %, bytes, memory bandwidth (GB/s), cbid, graph id, graph node id, "
    "Python id, Python parent id, Python module id, Python thread, Op count, finished, Total Allocated, Total Reserved, "
    "Bytes, Device Id, Device Type, num_warps, num_stages, sort_index, wait_on_stream, wait_on_cuda_event_id, "
    "wait_on_cuda_event_record_corr_id, In msg nelems, Out msg nelems, Group size, Rank, fwd_thread_id, ops, flops, Flops"
)
ARGS = frozenset(_ARGS.split(", "))
# Of libkineto's ActivityType.h, the flows of its output, and the names before PyTorch 1.12.
_CATEGORIES = (
    "cpu_op user_annotation gpu_user_annotation external_correlation cuda_runtime cuda_driver cuda_sync cuda_event "
    "cuda_profiler_range cpu_instant_event python_function overhead kernel gpu_memcpy gpu_memset collective_comm "
    "hip_runtime hip_driver xpu_runtime xpu_driver hpu_op glow_runtime mtia_runtime mtia_ccp_events mtia_workloadd "
    "mtia_insight privateuse1_runtime privateuse1_driver ac2g fwdbwd async_cpu_to_gpu async_gpu Trace "
    "Kernel Memcpy Memset Runtime Operator"
)
CATEGORIES = frozenset(_CATEGORIES.split())
PLACES = frozenset(("", "Spans", "Traces", "PyTorch Profiler", "Trace PyTorch Profiler"))  # pseudo threads
# Of events that last no time: instants, counters, flows.
POINT_NAMES = frozenset(
    ("[memory]", "Record Window End", "Iteration Start: PyTorch Profiler", "[OutOfMemory]", "ac2g", "fwdbwd")
)
TYPES = re.compile(
    r"(?:c10::)?(?:BFloat16|Half|Float|Double|Byte|Char|Short|Int|Long|Bool|UInt16|UInt32|UInt64|Q?U?Int8|QInt32"
    r"|Complex(?:Half|Float|Double)|[cC]omplex<(?:c10::Half|float|double)>|Float[48]_e\dm\d\w{0,12}"
    r"|Tensor|TensorList|Scalar|ScalarList|GenericList|Generator|Device|Stream|Storage|None|String|Dict)"
    r"|(?:(?:un)?signed )?(?:char|short|int|long)(?: (?:long|int|unsigned)){0,3}|float|double|bool|"
)
_WORDS = {
    "kernel_backend": "triton cuda cutlass cublas",
    "scope": "function backward_function user_scope kernel_function torchscript_function build_feature lite_interpreter",
    "Collective name": "allreduce allreduce_coalesced allreduce_sparse broadcast _broadcast_oop reduce _reduce_oop allgather "
    "_allgather_base all_gather allgather_into_tensor_coalesced allgather_coalesced reduce_scatter _reduce_scatter_base "
    "reduce_scatter_tensor_coalesced all_reduce all_to_all all_to_allv alltoall alltoall_base gather scatter send recv "
    "recv_anysource barrier wait init coalesced",
}
ARG_WORDS = {key: frozenset(words.split()) for key, words in _WORDS.items()}
