"""SDPA on its slower backend on Hopper: FlashAttention-2, memory-efficient or math where cuDNN has a faster kernel.

Looks for: attention kernels named after FlashAttention-2 or CUTLASS on a chip of capability 9 or 10, in half precision.
Saving: the attention kernels' time × (1 − 0.62): cuDNN took 0.57 to 0.64 of FlashAttention-2's time, forward and backward (H200,
causal, heads of 128 and 64: benchmarks/results/kernels-2026-11.md). The memory-efficient kernel is taken to be no faster than
FlashAttention-2; that was not measured.
Mend: choose cuDNN with `torch.nn.attention.sdpa_kernel`; flopwise's lever is `attention = sdpa-cudnn`.
"""

import re

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, freed
from flopwise.analysis.explanation import Kernel
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import ATTENTION_PART, MATMUL_OTHER
from flopwise.work.operation import ATTENTION

SHARE = 0.62  # cuDNN's time, of theirs
BACKENDS = (  # name, its kernels, how sure that share is of them
    ("FlashAttention-2", re.compile(r"pytorch_flash|flash_(fwd|bwd)_"), MEDIUM),
    ("memory-efficient attention", re.compile(r"fmha_cutlass[fb]_(bf16|f16)"), LOW),
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
    for name, pattern, sure in BACKENDS:
        slow = measured.kernels(facts, lambda kernel, pattern=pattern: _is(kernel, pattern))  # type: ignore[misc]
        spent = sum(kernel.gpu_ns for kernel in slow)
        if not spent:
            continue
        gone = spent * (1 - SHARE)
        arithmetic = (
            f"{units.duration(spent)} × (1 − {SHARE}) = {units.duration(gone)}: cuDNN takes {SHARE} of its time"
        )
        return finding(
            facts,
            __name__,
            f"SDPA runs on {name}: {units.duration(spent)}, where cuDNN's is faster on {gpu.title}",
            freed(facts, gone, arithmetic, sure),
            (ATTENTION_PART, MATMUL_OTHER),
            evidence=measured.told(slow),
            levers=LEVERS,
            code=CODE,
        )
    return None


def _is(kernel: Kernel, pattern: re.Pattern[str]) -> bool:
    return kernel.kind == ATTENTION and pattern.search(kernel.name) is not None
