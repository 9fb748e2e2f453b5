"""Matmuls in fp32 or TF32 where bf16 would do.

Looks for: matmul kernels whose names say fp32 or TF32; without a trace, a recipe that asks for them.
Saving: the step with bf16 autocast, by the model; from a trace alone, matmul time × (1 − its rate / the bf16 rate).
Mend: run forward and loss under `torch.autocast` in bf16; weights, gradients and optimizer stay in fp32.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.matmuls import in_precision, slower_ns
from flopwise.advice.savings import finding, reckoned
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import (
    BELOW_BANDWIDTH,
    IDEAL,
    MATMUL_OTHER,
    MATMUL_PRECISION,
    MATMUL_SHAPE,
    MEMORY_BOUND,
)

LEVERS = {"precision": "bf16"}
CODE = """with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = loss_of(model(tokens), targets)
loss.backward()"""
PARTS = (MATMUL_PRECISION, MATMUL_OTHER, MATMUL_SHAPE, IDEAL, MEMORY_BOUND, BELOW_BANDWIDTH)


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    wide = in_precision(facts, "fp32", "tf32")
    if not wide.ns and not wide.asked:
        return None
    gone, arithmetic = slower_ns(facts, wide.by_precision, "bf16")
    if gone is None:
        return None
    saving = reckoned(facts, LEVERS, gone, arithmetic, MEDIUM)
    amount = f"{units.duration(wide.ns)} of matmuls" if wide.ns else "matmuls"
    title = f"{amount} in {wide.words}, where bf16 would do"
    evidence = measured.told(wide.kernels)
    return finding(facts, __name__, title, saving, PARTS, evidence=evidence, levers=LEVERS, code=CODE)
