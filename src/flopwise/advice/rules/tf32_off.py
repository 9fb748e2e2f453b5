"""fp32 matmuls that run on the CUDA cores because TF32 is not allowed.

Looks for: matmul kernels whose names say fp32 on CUDA cores; without a trace, the recipe's precision fp32. Silent on GPUs
without TF32.
Saving: the step with TF32 allowed, by the model; from a trace alone, matmul time × (1 − fp32 rate / TF32 rate).
Mend: one line, `torch.set_float32_matmul_precision("high")`; bf16 saves more, and then this saves nothing beside it.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.matmuls import in_precision, slower_ns
from flopwise.advice.rules.fp32_matmul import PARTS
from flopwise.advice.savings import finding, reckoned
from flopwise.records.finding import MEDIUM, Finding

LEVERS = {"precision": "tf32"}
CODE = """torch.set_float32_matmul_precision("high")      # once, at the start"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    wide = in_precision(facts, "fp32")
    if not wide.ns and not wide.asked:
        return None
    gone, arithmetic = slower_ns(facts, wide.by_precision, "tf32")
    if gone is None:
        return None
    saving = reckoned(facts, LEVERS, gone, arithmetic, MEDIUM)
    amount = f"{units.duration(wide.ns)} of matmuls" if wide.ns else "matmuls"
    evidence = (
        *measured.told(wide.kernels),
        "an alternative to bf16 that keeps eight bits of exponent and ten of mantissa",
    )
    title = f"TF32 is off: {amount} in fp32 without tensor cores"
    return finding(facts, __name__, title, saving, PARTS, evidence=evidence, levers=LEVERS, code=CODE)
