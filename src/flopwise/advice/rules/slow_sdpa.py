"""SDPA on its slower backend on Hopper: FlashAttention-2, memory-efficient or math where cuDNN has a faster kernel.

Looks for: attention kernels named after FlashAttention-2 or CUTLASS on a chip of capability 9 or 10, in half precision.
Saving: the attention kernels' time × (1 − {CUDNN_SHARE}): cuDNN took 0.57 to 0.64 of FlashAttention-2's time, forward and
backward (H200, causal, heads of 128 and 64: benchmarks/results/kernels-2026-11.md). The memory-efficient kernel is taken to be
no faster than FlashAttention-2; that was not measured.
Fix: choose cuDNN with `torch.nn.attention.sdpa_kernel`; flopwise's lever is `attention = sdpa-cudnn`.
"""

import re

from flopwise import units
from flopwise.advice.constants import CUDNN_SHARE
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import ATTENTION_PART, MATMUL_OTHER
from flopwise.work.operation import ATTENTION

HOPPER = ("9.", "10.")  # capabilities on which cuDNN has attention kernels of its own kind
BACKENDS = (  # name, its kernels, how certain the share is for them
    ("FlashAttention-2", re.compile(r"pytorch_flash|flash_(fwd|bwd)_"), MEDIUM),
    ("memory-efficient attention", re.compile(r"fmha_cutlass[fb]_(bf16|f16)"), LOW),
)
CODE = """from torch.nn.attention import SDPBackend, sdpa_kernel

with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"""
RULE = Rule(__name__, (ATTENTION_PART, MATMUL_OTHER), {"attention": "sdpa-cudnn"}, CODE)


def check(facts: Facts) -> Finding | None:
    gpu, fused = facts.gpu, facts.kernels(lambda kernel: kernel.kind == ATTENTION)
    if gpu is None or not gpu.capability.startswith(HOPPER):
        return None
    for name, pattern, confidence in BACKENDS:
        slow = [kernel for kernel in fused if pattern.search(kernel.name)]
        spent = sum(kernel.gpu_ns for kernel in slow)
        if not spent:
            continue
        saved = spent * (1 - CUDNN_SHARE)
        why = f"cuDNN takes {CUDNN_SHARE} of its time"
        arithmetic = f"{units.duration(spent)} × (1 − {CUDNN_SHARE}) = {units.duration(saved)}: {why}"
        title = f"SDPA runs on {name}: {units.duration(spent)}, where cuDNN's is faster on {gpu.title}"
        saving = gpu_time_saved(facts, saved, arithmetic, confidence)
        return RULE.finding(facts, title, saving, describe(slow), evidence_ns=spent, spent_ns=spent)
    return None
