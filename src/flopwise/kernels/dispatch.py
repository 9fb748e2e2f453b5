"""Where a kernel can run: on a GPU, or anywhere when Triton interprets."""

import triton
from torch import Tensor


def runs_triton(x: Tensor) -> bool:
    """A kernel runs on CUDA tensors; on the CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests."""
    return x.is_cuda or bool(triton.knobs.runtime.interpret)
