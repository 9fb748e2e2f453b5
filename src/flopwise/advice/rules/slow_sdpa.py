"""SDPA on its slower backend on Hopper: FlashAttention-2, memory-efficient or math where cuDNN has a faster kernel.

Looks for: attention kernels named after FlashAttention-2 or CUTLASS on a chip of capability 9 or 10, in half precision.
Saving: the attention kernels' time × (1 − cuDNN's share of it), 0.62 of FlashAttention-2 and 0.3 of the memory-efficient
kernel (H200, causal, heads of 64 and 128: benchmarks/results/kernels-2026-11.md).
Mend: choose cuDNN with `torch.nn.attention.sdpa_kernel`; flopwise's lever is `attention = sdpa-cudnn`.
"""

import re

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.finding import MEDIUM, Finding
from flopwise.advice.savings import finding, freed
from flopwise.analysis.explanation import Kernel
from flopwise.analysis.waterfall import ATTENTION_PART, MATMUL_OTHER
from flopwise.work import ATTENTION

BACKENDS = (  # name, its kernels, cuDNN's time as a share of theirs
    ("FlashAttention-2", re.compile(r"pytorch_flash|flash_(fwd|bwd)_"), 0.62),
    ("memory-efficient attention", re.compile(r"fmha_cutlass[fb]_(bf16|f16)"), 0.3),
)
LEVERS = {"attention": "sdpa-cudnn"}
CODE = """from torch.nn.attention import SDPBackend, sdpa_kernel

with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    gpu = measured.gpu_of(facts)
    if gpu is None or not gpu.capability.startswith(measured.HOPPER):
        return None
    for name, pattern, share in BACKENDS:
        slow = measured.kernels(facts, lambda kernel, pattern=pattern: _is(kernel, pattern))  # type: ignore[misc]
        spent = sum(kernel.gpu_ns for kernel in slow)
        if not spent:
            continue
        gone = spent * (1 - share)
        arithmetic = (
            f"{units.duration(spent)} × (1 − {share}) = {units.duration(gone)}: cuDNN takes {share} of its time"
        )
        return finding(
            facts,
            __name__,
            f"SDPA runs on {name}: {units.duration(spent)}, where cuDNN's is faster on {gpu.title}",
            freed(facts, gone, arithmetic, MEDIUM),
            (ATTENTION_PART, MATMUL_OTHER),
            evidence=measured.told(slow),
            levers=LEVERS,
            code=CODE,
        )
    return None


def _is(kernel: Kernel, pattern: re.Pattern[str]) -> bool:
    return kernel.kind == ATTENTION and pattern.search(kernel.name) is not None
