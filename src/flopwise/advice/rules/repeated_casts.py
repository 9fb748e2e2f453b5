"""Weights cast to half precision again in every step.

Looks for: cast kernels (`bfloat16_copy`, Inductor's `…_to_copy…` that do nothing else) in the forward and backward pass of a
step whose matmuls are in half precision.
Saving: the casts' time less what writing 2 more bytes a parameter costs the optimizer, which can leave the half-precision
copy as it goes (at {REACHED_BANDWIDTH:%} of the bandwidth; where the parameters are unknown, {CAST_WRITTEN_SHARE} of the
time is assumed).
Fix: keep a half-precision copy of the weights next to the fp32 ones, refreshed by the optimizer step.
"""

import re

from flopwise import units
from flopwise.advice.constants import CAST_WRITTEN_SHARE, HALF_SHARE, REACHED_BANDWIDTH
from flopwise.advice.facts import Facts, describe
from flopwise.advice.matmuls import in_precision
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, MEMORY_BOUND
from flopwise.work.operation import COPY, MATMUL

HALF = ("bf16", "fp16")
CODE = """# the model holds bf16 weights, the optimizer their fp32 masters; one pass after the update refreshes all of them
masters = [p.detach().float().clone() for p in model.parameters()]      # before the model is rounded
weights = list(model.bfloat16().parameters())
optimizer = torch.optim.AdamW(masters, lr=lr, fused=True)
for master, p in zip(masters, weights): master.grad, p.grad = p.grad.float(), None      # after each backward pass
optimizer.step()
torch._foreach_copy_(weights, masters)"""
RULE = Rule(__name__, (MEMORY_BOUND, BELOW_BANDWIDTH), code=CODE)
_CAST = re.compile(
    r"bfloat16_copy_kernel|float16_copy_kernel|^triton_poi_fused__to_copy(_t)?_\d+$|convert_element_type_\d+$"
)


def check(facts: Facts) -> Finding | None:
    recipe = facts.recipe
    if facts.explanation is None or not facts.trains or (recipe is not None and recipe.precision not in HALF):
        return None
    half = in_precision(facts, *HALF)
    casts = facts.kernels(lambda kernel: kernel.kind == COPY and _CAST.search(kernel.name) is not None)
    spent = sum(kernel.gpu_ns for kernel in casts)
    if half is None or half.ns < HALF_SHARE * facts.class_ns(MATMUL) or not spent:
        return None
    written = CAST_WRITTEN_SHARE * spent
    if facts.parameters and facts.bandwidth:
        written = 2 * facts.parameters / (REACHED_BANDWIDTH * facts.bandwidth) * 1e9
    saved = max(0.0, spent - written)
    arithmetic = (
        f"casts {units.duration(spent)} − {units.duration(written)} to write the copies once = {units.duration(saved)}"
    )
    title = f"weights are cast to half precision in every step: {units.duration(spent)}"
    return RULE.finding(
        facts, title, gpu_time_saved(facts, saved, arithmetic, LOW), describe(casts), evidence_ns=spent, casts_ns=spent
    )
