"""Weights cast to half precision anew in every step.

Looks for: cast kernels (`bfloat16_copy`, Inductor's `…_to_copy…` that do nothing else) in the forward and backward pass of a
step whose matmuls are in half precision.
Saving: the casts' time less what writing 2 more bytes a parameter costs the optimizer, which can leave the half-precision
copy as it goes (at 80 % of the bandwidth; where the parameters are not known, 0.3 of the time is assumed).
Mend: keep a half-precision copy of the weights beside the fp32 ones, refreshed by the optimizer step.
"""

import re

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, freed
from flopwise.analysis.explanation import Kernel
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, MEMORY_BOUND
from flopwise.work.operation import COPY

REACHED, WRITTEN_SHARE = 0.8, 0.3
HALF = ("bf16", "fp16")
CODE = """# the model holds bf16 weights, the optimizer their fp32 masters; one pass after the update refreshes all of them
masters = [p.detach().float().clone() for p in model.parameters()]      # before the model is rounded
weights = list(model.bfloat16().parameters())
optimizer = torch.optim.AdamW(masters, lr=lr, fused=True)
for master, p in zip(masters, weights): master.grad, p.grad = p.grad.float(), None      # after each backward pass
optimizer.step()
torch._foreach_copy_(weights, masters)"""
_CAST = re.compile(
    r"bfloat16_copy_kernel|float16_copy_kernel|^triton_poi_fused__to_copy(_t)?_\d+$|convert_element_type_\d+$"
)


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    e, recipe = facts.explanation, measured.recipe_of(facts)
    if e is None or (recipe is not None and recipe.precision not in HALF):
        return None
    half = sum(share for label, share in e.matmul_precision.items() if label.startswith(HALF))
    casts = measured.kernels(facts, _casts)
    spent = sum(kernel.gpu_ns for kernel in casts)
    if half < 0.5 or not spent:
        return None
    written = _written_ns(facts, spent)
    gone = max(0.0, spent - written)
    arithmetic = (
        f"casts {units.duration(spent)} − {units.duration(written)} to write the copies once = {units.duration(gone)}"
    )
    title = f"weights are cast to half precision in every step: {units.duration(spent)}"
    saving, parts = freed(facts, gone, arithmetic, LOW), (MEMORY_BOUND, BELOW_BANDWIDTH)
    return finding(facts, __name__, title, saving, parts, evidence=measured.told(casts), code=CODE)


def _casts(kernel: Kernel) -> bool:
    return kernel.kind == COPY and _CAST.search(kernel.name) is not None


def _written_ns(facts: Facts, spent: float) -> float:
    parameters = facts.point.ran.parameters if facts.point is not None and facts.point.ran is not None else 0
    parameters = parameters or (facts.account.parameters if facts.account is not None else 0)
    bandwidth = measured.bandwidth(facts)
    if parameters and bandwidth:
        return 2 * parameters / (REACHED * bandwidth) * 1e9
    return WRITTEN_SHARE * spent
