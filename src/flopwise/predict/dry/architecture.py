"""What differs between GPU generations, and on the CPU, for the memory and the ops of a step."""

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A generation of NVIDIA GPUs, as PyTorch treats it; or the CPU, where nothing is rounded and nothing imitated."""

    name: str
    workspace_bytes: int  # cuBLAS, per thread that multiplies matrices: at::cuda::getChosenWorkspaceSize of torch 2.11
    attention: tuple[str, ...]  # SDPA's backends, in its order of preference


CPU = "cpu"
_ELSEWHERE = 8_519_680  # of bytes of workspace: all but Hopper
_CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")  # on capabilities 9.x and 10.x
_FLASH_FIRST = ("flash", "efficient", "math", "cudnn")
_KNOWN = {
    known.name: known
    for known in (
        Architecture(name="ampere", workspace_bytes=_ELSEWHERE, attention=_FLASH_FIRST),
        Architecture(name="ada", workspace_bytes=_ELSEWHERE, attention=_FLASH_FIRST),
        Architecture(name="hopper", workspace_bytes=32 << 20, attention=_CUDNN_FIRST),
        Architecture(name="blackwell", workspace_bytes=_ELSEWHERE, attention=_CUDNN_FIRST),
        Architecture(name="blackwell-rtx", workspace_bytes=_ELSEWHERE, attention=_FLASH_FIRST),
        Architecture(name=CPU, workspace_bytes=0, attention=()),
    )
}


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
