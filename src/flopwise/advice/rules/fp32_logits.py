"""All logits held in memory, in fp32, for the loss.

Looks for: loss kernels that take and give fp32 over whole logits (`cunn_SoftMax…<…float, float, float…>`), or a recipe whose
loss is `full`, where the loss takes {LOGITS_SHARE:%} of the step or a chunked one saves {LOGITS_BYTES:size}.
Saving: the step with the fused loss, by the model; from a trace alone {LOSS_SAVED} of the loss kernels' time (one pass instead
of two). Memory as predicted, or rows × vocabulary × 4 bytes × 2 from the trace's shapes.
Fix: a loss over chunks of the rows that never holds all logits (`loss = fused` or `chunked`).
"""

import re

from flopwise import units
from flopwise.advice.constants import LOGITS_BYTES, LOGITS_SHARE, LOSS_SAVED
from flopwise.advice.facts import Facts, describe
from flopwise.advice.predicted import saved_bytes
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, MEMORY_BOUND
from flopwise.work.operation import LOSS

CODE = """# chunks of rows: logits of 1,024 tokens at a time, recomputed in the backward pass
losses = [checkpoint(lambda h, y: F.cross_entropy(head(h).float(), y, reduction="sum"), h, y, use_reentrant=False)
          for h, y in zip(hidden.flatten(0, 1).split(1024), targets.flatten().split(1024))]
loss = torch.stack(losses).sum() / targets.numel()      # flopwise: loss = "fused" does it in one kernel"""
RULE = Rule(__name__, (MEMORY_BOUND, BELOW_BANDWIDTH), {"loss": "fused"}, CODE)
_WHOLE = re.compile(r"cunn_SoftMax(Forward|Backward)\w*<\d+, (float|c10::BFloat16|c10::Half), float, float")


def check(facts: Facts) -> Finding | None:
    step = facts.step_ns
    if facts.recipe is not None and facts.recipe.loss != "full":
        return None
    kernels = facts.kernels(lambda kernel: kernel.kind == LOSS and _WHOLE.search(kernel.name) is not None)
    if not step or (facts.explanation is not None and not kernels):
        return None
    spent = sum(kernel.gpu_ns for kernel in kernels)
    n_bytes = saved_bytes(facts, RULE.levers) or _logits_bytes(facts)
    if spent < LOGITS_SHARE * step and n_bytes < LOGITS_BYTES:
        return None
    arithmetic = f"{units.duration(spent)} × {LOSS_SAVED} = {units.duration(LOSS_SAVED * spent)} of GPU time"
    took = f": {units.duration(spent)}" if spent else ""
    held = f", {units.size(n_bytes)} of memory" if n_bytes else ""
    title = f"the loss holds all logits in fp32{took}{held}"
    saving = predicted_or(facts, RULE.levers, gpu_time_saved(facts, LOSS_SAVED * spent, arithmetic, LOW))
    return RULE.finding(facts, title, saving, describe(kernels), n_bytes, evidence_ns=spent, spent_ns=spent)


def _logits_bytes(facts: Facts) -> int:
    """Logits and their gradient, from the product with the most columns that is no square: the head's."""
    heads = [p.m * p.n for p in facts.details.products if p.batch == 1 and p.n > 4 * p.k]
    return 2 * 4 * max(heads, default=0)
