"""CUDA C++ compiled at run time: NVRTC, which torch brings along, turns a source into a cubin; no host compiler, no ninja.

torch has the same inside (`torch.cuda._compile_kernel`); it looks for a CUDA toolkit's headers first, passes integers as
32 bits, and is private.
"""

import ctypes
import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flopwise.errors import Unsupported

HINT = "the CUDA kernels need an NVIDIA GPU and the NVRTC library of torch's CUDA build; 'torch' and 'triton' do not"


def compile_cubin(source: str, name: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """The machine code of a CUDA source for one architecture ('90', '100a'). Needs no GPU."""
    library = nvrtc()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None), "creating")
    try:
        flags = [f"--gpu-architecture=sm_{arch}".encode(), b"--std=c++17", *(option.encode() for option in options)]
        failed = library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        if failed:
            raise Unsupported(f"NVRTC cannot compile {name} for sm_{arch}: {_log(library, program)}", HINT)
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "asking the size of")
        code = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, code), "reading")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(size.value, 1))
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _check(status: int, doing: str) -> None:
    if status:
        raise Unsupported(f"NVRTC failed with status {status} while {doing} a program", HINT)


@cache
def nvrtc() -> ctypes.CDLL:
    """The library: where the loader finds it, else where torch's packages put it, else in the CUDA toolkit."""
    major = (torch.version.cuda or "").partition(".")[0]
    for path in _candidates(major):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise Unsupported("no NVRTC library is found", HINT)


def _candidates(major: str) -> list[str]:
    named = [f"libnvrtc.so.{major}"] if major else []
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [packages / "cuda_nvrtc" / "lib", *sorted(packages.glob("cu1*/lib")), Path(torch.__file__).parent / "lib"]
    if toolkit := os.environ.get("CUDA_HOME"):
        folders.append(Path(toolkit) / "lib64")
    pattern = f"libnvrtc*.so.{major}*" if major else "libnvrtc.so.*"
    found = [str(path) for folder in folders for path in sorted(folder.glob(pattern)) if "builtins" not in path.name]
    return [*named, *found]


class Function:
    """A kernel of a loaded cubin. Call it with a grid, a block and ctypes arguments; it runs in torch's current stream."""

    def __init__(self, driver: ctypes.CDLL, context: ctypes.c_void_p, handle: ctypes.c_void_p, index: int) -> None:
        self.driver, self.context, self.handle, self.index = driver, context, handle, index

    def __call__(self, blocks: int, threads: int, *arguments: "ctypes._SimpleCData[Any]") -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.index).cuda_stream)
        # Pushed, because this thread may have no context yet, or another GPU's.
        _driver_check(self.driver.cuCtxPushCurrent_v2(self.context), "entering the context")
        try:
            _driver_check(
                self.driver.cuLaunchKernel(self.handle, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None),
                "launching",
            )
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def blocks_per_sm(self, threads: int) -> int:
        """How many blocks of so many threads fit on a multiprocessor at once, as the driver says."""
        return self._ask("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.handle, threads, ctypes.c_size_t(0))

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._ask("cuFuncGetAttribute", 4, self.handle)  # CU_FUNC_ATTRIBUTE_NUM_REGS

    @property
    def local_bytes(self) -> int:
        """Memory of a thread for what its registers do not hold."""
        return self._ask("cuFuncGetAttribute", 3, self.handle)  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES

    def _ask(self, function: str, *arguments: Any) -> int:
        """The number that a function of the driver writes to its first argument."""
        answer = ctypes.c_int()
        _driver_check(self.driver.cuCtxPushCurrent_v2(self.context), "entering the context")
        try:
            _driver_check(getattr(self.driver, function)(ctypes.byref(answer), *arguments), f"calling {function}")
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return answer.value


def pointer(x: Tensor) -> ctypes.c_void_p:
    """The address of a tensor's first element, as a kernel's argument."""
    return ctypes.c_void_p(x.data_ptr())


def load(source: str, name: str, kernels: Sequence[str], index: int, options: Sequence[str] = ()) -> list[Function]:
    """Compile a source for GPU `index`, load it there, and hand out its `extern "C"` kernels by name."""
    if not torch.cuda.is_available():
        raise Unsupported(f"{name} needs a GPU", HINT)
    driver = _driver()
    arch = "".join(map(str, torch.cuda.get_device_capability(index)))
    code = compile_cubin(source, name, arch, options)
    number, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _driver_check(driver.cuDeviceGet(ctypes.byref(number), index), "asking for the GPU")
    _driver_check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "asking for the context")
    _driver_check(driver.cuCtxPushCurrent_v2(context), "entering the context")
    try:
        _driver_check(driver.cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    functions = []
    for kernel in kernels:
        handle = ctypes.c_void_p()
        _driver_check(driver.cuModuleGetFunction(ctypes.byref(handle), module, kernel.encode()), f"finding {kernel}")
        functions.append(Function(driver, context, handle, index))
    return functions


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported("no CUDA driver is found", HINT) from error


def _driver_check(status: int, doing: str) -> None:
    if status:
        raise Unsupported(f"the CUDA driver failed with status {status} while {doing}", HINT)
