"""fp32 matmuls that run on the CUDA cores because TF32 is not allowed.

Looks for: matmul kernels whose names say fp32 on CUDA cores; without a trace, the recipe's precision fp32. Silent on GPUs
without TF32.
Saving: the step with TF32 allowed, by the model; from a trace alone, matmul time × (1 − fp32 rate / TF32 rate).
Fix: one line, `torch.set_float32_matmul_precision("high")`; bf16 saves more, and TF32 then saves nothing on top of it.
"""

from flopwise.advice.facts import Facts, describe
from flopwise.advice.matmuls import in_precision, slower_ns
from flopwise.advice.rules.fp32_matmul import PARTS
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.records.finding import Finding

CODE = 'torch.set_float32_matmul_precision("high")      # once, at the start'
RULE = Rule(__name__, PARTS, {"precision": "tf32"}, CODE)
ALTERNATIVE = "an alternative to bf16 that keeps eight bits of exponent and ten of mantissa"


def check(facts: Facts) -> Finding | None:
    matmuls = in_precision(facts, "fp32")
    if matmuls is None:
        return None
    saved, arithmetic = slower_ns(facts, matmuls, "tf32")
    if saved is None:
        return None
    saving = predicted_or(facts, RULE.levers, gpu_time_saved(facts, saved, arithmetic))
    title = f"TF32 is off: {matmuls.amount} in fp32 without tensor cores"
    return RULE.finding(
        facts, title, saving, (*describe(matmuls.kernels), ALTERNATIVE), evidence_ns=matmuls.ns, matmul_ns=matmuls.ns
    )
