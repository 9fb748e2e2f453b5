"""Matmuls in fp32 or TF32 where bf16 would do.

Looks for: matmul kernels whose names say fp32 or TF32; without a trace, a recipe that asks for them.
Saving: the step with bf16 autocast, by the model; from a trace alone, matmul time × (1 − its rate / the bf16 rate).
Fix: run forward and loss under `torch.autocast` in bf16; weights, gradients and optimizer stay in fp32.
"""

import msgspec

from flopwise.advice.facts import Facts, describe
from flopwise.advice.matmuls import in_precision, slower_ns
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.records import waterfall as part
from flopwise.records.finding import Finding

CODE = """with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = loss_of(model(tokens), targets)
loss.backward()"""
CODE_INFERENCE = """with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    out = model(tokens)"""
_MATMUL = (part.MATMUL_PRECISION, part.MATMUL_OTHER, part.MATMUL_SHAPE)
PARTS = (*_MATMUL, part.IDEAL, part.MEMORY_BOUND, part.BELOW_BANDWIDTH)
RULE = Rule(__name__, PARTS, {"precision": "bf16"}, CODE)


def check(facts: Facts) -> Finding | None:
    matmuls = in_precision(facts, "fp32", "tf32")
    if matmuls is None:
        return None
    saved, arithmetic = slower_ns(facts, matmuls, "bf16")
    if saved is None:
        return None
    saving = predicted_or(facts, RULE.levers, gpu_time_saved(facts, saved, arithmetic))
    title = f"{matmuls.amount} in {matmuls.names}, where bf16 would do"
    rule = RULE if facts.trains else msgspec.structs.replace(RULE, code=CODE_INFERENCE)
    return rule.finding(facts, title, saving, describe(matmuls.kernels), evidence_ns=matmuls.ns, matmul_ns=matmuls.ns)
