"""Gradients are set to zero by writing, and then added to.

Looks for: fills and memsets inside `zero_grad`.
Saving: the time of these fills, and as much again twice: a gradient that is there is read and written once more when the
backward pass adds to it, instead of taking its place.
Mend: `optimizer.zero_grad(set_to_none=True)`, PyTorch's default since 2.0.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, freed
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, MEMORY_BOUND, OPTIMIZER_PART

ADDED = 2.0  # a read and a write more for each gradient, beside the fill's one write
CODE = "optimizer.zero_grad(set_to_none=True)      # before the backward pass"


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    e = facts.explanation
    if e is None:
        return None
    fills = [part for part in e.phase_class_modules if "zero_grad" in part.module]
    spent, number = sum(part.gpu_ns for part in fills), sum(part.count + part.copies for part in fills)
    if not spent:
        return None
    gone = (1 + ADDED) * spent
    arithmetic = (
        f"fills {units.duration(spent)} × (1 + {ADDED:.0f} for adding to what is there) = {units.duration(gone)}"
    )
    evidence = measured.told(measured.kernels(facts, lambda kernel: "FillFunctor" in kernel.name), 1)
    title = f"gradients are zeroed by writing: {number:.0f} fills, {units.duration(spent)}"
    saving, parts = freed(facts, gone, arithmetic, MEDIUM), (OPTIMIZER_PART, MEMORY_BOUND, BELOW_BANDWIDTH)
    return finding(facts, __name__, title, saving, parts, evidence=evidence, code=CODE)
