"""Runtime and driver calls that neither launch work nor wait for it, by what the host spends its time on in them."""

import re

_API = r"^(?:cuda|cu|hip)"
_ALLOCATES = re.compile(
    rf"{_API}(?:Malloc|Free|Host(?:Alloc|Malloc|Register|Unregister|Free)"
    r"|Mem(?:Alloc|Free|Create|Map|Unmap|Release|SetAccess|Address|Host|Pool))"
)
_LOADS = re.compile(rf"{_API}(?:ModuleLoad|LibraryLoad|LinkComplete)")
_PUTS_WORK = re.compile(rf"{_API}(?:(?:Ext)?(?:Module)?Launch(?:Cooperative)?Kernel|Launch$|Memcpy|Memset)")
_CAPTURES = re.compile(rf"{_API}(?:Stream(?:Begin|End)Capture|Graph(?:Instantiate|Clone|Upload))")


def is_allocation(name: str) -> bool:
    """Whether a call asks the driver for memory or gives some back.

    >>> [is_allocation(name) for name in ("cudaMalloc", "hipFree", "cuMemCreate", "cudaMemcpyAsync", "cudaMemsetAsync")]
    [True, True, True, False, False]
    """
    return _ALLOCATES.match(name) is not None


def is_module_load(name: str) -> bool:
    """Whether a call loads a kernel's code.

    >>> is_module_load("cuModuleLoadData"), is_module_load("cuLaunchKernel")
    (True, False)
    """
    return _LOADS.match(name) is not None


def is_capture(name: str) -> bool:
    """Whether a call records a CUDA graph or makes one ready to run.

    >>> is_capture("hipStreamBeginCapture"), is_capture("cudaGraphLaunch"), is_capture("cudaStreamIsCapturing")
    (True, False, False)
    """
    return _CAPTURES.match(name) is not None


def puts_work(name: str) -> bool:
    """Whether a call puts work on the GPU; during a capture, into the graph.

    >>> [puts_work(name) for name in ("cudaLaunchKernelExC", "hipExtModuleLaunchKernel", "cudaMemsetAsync", "cudaGraphLaunch")]
    [True, True, True, False]
    """
    return _PUTS_WORK.match(name) is not None


def is_kept(name: str) -> bool:
    """Whether a trace keeps the call: any of the above."""
    return is_allocation(name) or is_module_load(name) or is_capture(name)
