"""Every private name of Triton that is used, as `torch_private.py` has torch's: a new release is one place to look."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def triton_interprets() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def compile_triton(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Iterable[int],
    arch: int,
    options: Mapping[str, Any],
) -> Any:
    """A Triton kernel compiled without a GPU, for sm_`arch`. `divisible`: positions of arguments that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(position,): [["tt.divisibility", 16]] for position in divisible}
    made: Any = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        made = GluonASTSource
    source = made(kernel, dict(signature), dict(constants), attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))


def gluon_add_to_global() -> Any:
    """A function of Gluon's language that begins to add a tile in shared memory to a tensor in memory, by the copy engine.

    Gluon's own `tma` lacks it in Triton 3.6 and 3.7, though the instruction is there.
    """
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    def add_to_global(target: Any, corner: Any, source: Any, _semantic: Any = None) -> None:
        corner = _semantic._convert_to_ir_values(corner, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, target.handle, corner, source.handle)

    return builtin(add_to_global)


def cuobjdump() -> Path:
    """NVIDIA's program that reads compiled kernels; Triton brings it along."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
