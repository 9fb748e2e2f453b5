"""What differs between GPU generations, and on the CPU, for the memory and the ops of a step."""

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.gpu_facts import Gpu


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A generation of GPUs, as PyTorch treats it; or the CPU, where nothing is rounded and nothing imitated."""

    name: str
    workspace_bytes: int  # cuBLAS or hipBLAS, per thread that multiplies matrices: PyTorch's getChosenWorkspaceSize
    attention: tuple[str, ...]  # SDPA's backends, in its order of preference


CPU = "cpu"
_ELSEWHERE = 8_519_680  # bytes of workspace: every NVIDIA GPU but Hopper
_CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")  # on capabilities 9.x and 10.x
_FLASH_FIRST = ("flash", "efficient", "math", "cudnn")
_KNOWN = {
    known.name: known
    for known in (
        Architecture(name="turing", workspace_bytes=_ELSEWHERE, attention=("efficient", "math")),
        Architecture(name="ampere", workspace_bytes=_ELSEWHERE, attention=_FLASH_FIRST),
        Architecture(name="ada", workspace_bytes=_ELSEWHERE, attention=_FLASH_FIRST),
        Architecture(name="hopper", workspace_bytes=32 << 20, attention=_CUDNN_FIRST),
        Architecture(name="blackwell", workspace_bytes=_ELSEWHERE, attention=_CUDNN_FIRST),
        Architecture(name="blackwell-rtx", workspace_bytes=_ELSEWHERE, attention=_FLASH_FIRST),
        Architecture(name="cdna2", workspace_bytes=32 << 20, attention=_FLASH_FIRST[:3]),
        Architecture(name="cdna3", workspace_bytes=128 << 20, attention=_FLASH_FIRST[:3]),
        Architecture(name=CPU, workspace_bytes=0, attention=()),
    )
}
_SINCE = (  # the least compute capability of a generation, newest first; Volta is as Turing here
    ((12, 0), "blackwell-rtx"),
    ((10, 0), "blackwell"),
    ((9, 0), "hopper"),
    ((8, 9), "ada"),
    ((8, 0), "ampere"),
    ((0, 0), "turing"),
)


def architecture_of(gpu: Gpu | None) -> str:
    """The name of a GPU's generation (Hopper, if none is named), or of the CPU.

    >>> from flopwise.spec.gpu import gpu
    >>> [architecture_of(one) for one in (gpu("a100"), gpu("t4"), gpu("mi300x"), gpu("cpu"), None)]
    ['ampere', 'turing', 'cdna3', 'cpu', 'hopper']
    """
    if gpu is None or gpu.name == CPU:
        return "hopper" if gpu is None else CPU
    if not gpu.capability:  # AMD
        return "cdna2" if gpu.name.startswith("mi2") else "cdna3"
    found = tuple(int(part) for part in gpu.capability.split("."))
    return next(name for since, name in _SINCE if found >= since)


def architecture(name: str) -> Architecture:
    """The generation called `name`.

    >>> architecture("hopper").workspace_bytes
    33554432
    """
    if name not in _KNOWN:
        raise FlopwiseError(
            f"there is no GPU architecture {fields.show(name)}",
            f"{fields.did_you_mean(name, _KNOWN)}architectures: {', '.join(_KNOWN)}",
        )
    return _KNOWN[name]
