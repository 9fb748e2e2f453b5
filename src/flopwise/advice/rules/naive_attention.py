"""Attention written out: scores, mask, softmax and values as kernels of their own, each through memory.

Looks for: softmax work and batched matmuls inside attention and no fused attention kernel; softmax kernels outside the loss
in a trace without modules; without a trace, the recipe's naive attention.
Saving: the step with SDPA, by the model; from a trace alone the time of softmax, scale and mask, forward and backward: in a
fused kernel they stay on chip (its matmuls are taken to be as fast as these). The scores' memory is saved as well.
Mend: `torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)`.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import saved_bytes
from flopwise.advice.savings import finding, reckoned
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import ATTENTION_PART, BELOW_BANDWIDTH, MEMORY_BOUND
from flopwise.trace.phases import LOSS
from flopwise.work.operation import ATTENTION, SOFTMAX

LEVERS = {"attention": "sdpa"}
CODE = "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)      # q, k, v: [B, H, T, D]"


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    recipe, e = measured.recipe_of(facts), facts.explanation
    spent = _softmax_ns(facts)
    asked = e is None and recipe is not None and recipe.attention == "naive"
    if measured.class_ns(facts, ATTENTION) or not (spent or asked):
        return None
    saving = reckoned(facts, LEVERS, spent, f"softmax, scale and mask: {units.duration(spent)} of GPU time", MEDIUM)
    took = f": {units.duration(spent)} of softmax and mask through memory" if spent else ""
    return finding(
        facts,
        __name__,
        f"attention is written out{took}",
        saving,
        (ATTENTION_PART, MEMORY_BOUND, BELOW_BANDWIDTH),
        saving_bytes=saved_bytes(facts, LEVERS),
        evidence=_evidence(facts),
        levers=LEVERS,
        code=CODE,
    )


def _softmax_ns(facts: Facts) -> float:
    e = facts.explanation
    if e is None:
        return 0.0
    parts = (e.attention, e.attention_backward)
    named = sum(part.softmax_ns for part in parts) if any(part.matmul_ns for part in parts) else 0.0
    return named or measured.class_ns(facts, SOFTMAX) - measured.class_ns(facts, SOFTMAX, phase=LOSS)


def _evidence(facts: Facts) -> tuple[str, ...]:
    e = facts.explanation
    if e is None:
        return ("the recipe says attention = naive",)
    lines = [
        f"{phase}: softmax {units.duration(part.softmax_ns)}, matmuls of scores and values {units.duration(part.matmul_ns)}"
        for phase, part in (("forward", e.attention), ("backward", e.attention_backward))
        if part.softmax_ns
    ]
    return (*lines, *measured.told(measured.kernels(facts, lambda kernel: kernel.kind == SOFTMAX)))
