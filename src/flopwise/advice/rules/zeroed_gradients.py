"""Gradients are set to zero by writing, and then added to.

Looks for: fills and memsets inside `zero_grad`.
Saving: the time of these fills. What the backward pass then spends on adding to gradients that exist is saved as well, and not
counted.
Fix: `optimizer.zero_grad(set_to_none=True)`, PyTorch's default since 2.0.
"""

from flopwise import units
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.records.finding import Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, MEMORY_BOUND, OPTIMIZER_PART

CODE = "optimizer.zero_grad(set_to_none=True)      # before the backward pass"
RULE = Rule(__name__, (OPTIMIZER_PART, MEMORY_BOUND, BELOW_BANDWIDTH), code=CODE)


def check(facts: Facts) -> Finding | None:
    parts = facts.explanation.phase_class_modules if facts.explanation is not None else ()
    fills = [part for part in parts if "zero_grad" in part.module]
    spent, number = sum(part.gpu_ns for part in fills), sum(part.count + part.copies for part in fills)
    if not spent:
        return None
    arithmetic = f"fills: {units.duration(spent)} of GPU time"
    title = f"gradients are zeroed by writing: {number:.0f} fills, {units.duration(spent)}"
    kernels = facts.kernels(lambda kernel: "FillFunctor" in kernel.name)
    saving = gpu_time_saved(facts, spent, arithmetic)
    return RULE.finding(facts, title, saving, describe(kernels, 1), evidence_ns=spent, fills=number, spent_ns=spent)
