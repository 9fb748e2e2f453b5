"""Attention written out: scores, mask, softmax and values as kernels of their own, each through memory.

Looks for: softmax work and batched matmuls inside attention and no fused attention kernel; softmax kernels outside the loss
in a trace without modules; without a trace, the recipe's naive attention.
Saving: the step with SDPA, by the model; from a trace alone the time of softmax, scale and mask, forward and backward: in a
fused kernel they stay on chip (its matmuls are taken to be as fast as these). The scores' memory is saved as well.
Fix: `torch.nn.functional.scaled_dot_product_attention(q, k, v)`, with `is_causal=True` for a causal mask.
"""

from flopwise import units
from flopwise.advice.facts import Evidence, Facts, describe
from flopwise.advice.predicted import saved_bytes
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.records.finding import Finding
from flopwise.records.waterfall import ATTENTION_PART, BELOW_BANDWIDTH, MEMORY_BOUND
from flopwise.trace.phases import LOSS
from flopwise.work.operation import ATTENTION, SOFTMAX

CODE = "out = torch.nn.functional.scaled_dot_product_attention(q, k, v)      # [B, H, T, D]; is_causal=True for a causal mask"
RULE = Rule(__name__, (ATTENTION_PART, MEMORY_BOUND, BELOW_BANDWIDTH), {"attention": "sdpa"}, CODE)


def check(facts: Facts) -> Finding | None:
    spent = _softmax_ns(facts)
    asked = facts.explanation is None and facts.recipe is not None and facts.recipe.attention == "naive"
    if facts.class_ns(ATTENTION) or not (spent or asked):
        return None
    traced = gpu_time_saved(facts, spent, f"softmax, scale and mask: {units.duration(spent)} of GPU time")
    took = f": {units.duration(spent)} of softmax and mask through memory" if spent else ""
    saving, n_bytes = predicted_or(facts, RULE.levers, traced), saved_bytes(facts, RULE.levers)
    return RULE.finding(
        facts, f"attention is written out{took}", saving, _evidence(facts), n_bytes, evidence_ns=spent, softmax_ns=spent
    )


def _softmax_ns(facts: Facts) -> float:
    e = facts.explanation
    if e is None:
        return 0.0
    parts = (e.attention, e.attention_backward)
    named = sum(part.softmax_ns for part in parts) if any(part.matmul_ns for part in parts) else 0.0
    return named or facts.class_ns(SOFTMAX) - facts.class_ns(SOFTMAX, phase=LOSS)


def _evidence(facts: Facts) -> tuple[str | Evidence, ...]:
    e = facts.explanation
    if e is None:
        return ("the recipe says attention = naive",)
    lines = [
        f"{phase}: softmax {units.duration(part.softmax_ns)}, matmuls of scores and values {units.duration(part.matmul_ns)}"
        for phase, part in (("forward", e.attention), ("backward", e.attention_backward))
        if part.softmax_ns
    ]
    return (*lines, *describe(facts.kernels(lambda kernel: kernel.kind == SOFTMAX)))
