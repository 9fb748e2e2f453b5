"""All logits held in memory, in fp32, for the loss.

Looks for: loss kernels that take and give fp32 over whole logits (`cunn_SoftMax…<…float, float, float…>`) beside matmuls in
half precision, or a recipe whose loss is `full`, where logits take a tenth of the peak or the loss 2 % of the step.
Saving: the step with the fused loss, by the model; from a trace alone half of the loss kernels' time and of the casts beside
them (one pass instead of two). Memory as predicted, or rows × vocabulary × 4 bytes × 2 from the trace's shapes.
Mend: a loss over chunks of the rows that never holds all logits (`loss = fused` or `chunked`).
"""

import re

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import saved_bytes
from flopwise.advice.savings import finding, reckoned
from flopwise.analysis.explanation import Kernel
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, MEMORY_BOUND
from flopwise.work.operation import LOSS

GONE, LEAST_SHARE, LEAST_BYTES = 0.5, 0.02, 2**30
LEVERS = {"loss": "fused"}
CODE = """# chunks of rows: logits of 1,024 tokens at a time, recomputed in the backward pass
losses = [checkpoint(lambda h, y: F.cross_entropy(head(h).float(), y, reduction="sum"), h, y, use_reentrant=False)
          for h, y in zip(hidden.flatten(0, 1).split(1024), targets.flatten().split(1024))]
loss = torch.stack(losses).sum() / targets.numel()      # flopwise: loss = "fused" does it in one kernel"""
_WHOLE = re.compile(r"cunn_SoftMax(Forward|Backward)\w*<\d+, (float|c10::BFloat16|c10::Half), float, float")


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    recipe, step = measured.recipe_of(facts), measured.step_ns(facts)
    if recipe is not None and recipe.loss != "full":
        return None
    whole = measured.kernels(facts, _over_logits)
    spent = sum(kernel.gpu_ns for kernel in whole)
    n_bytes = saved_bytes(facts, LEVERS) or _logits_bytes(facts)
    if (facts.explanation is not None and not whole) or not step:
        return None
    if spent < LEAST_SHARE * step and n_bytes < LEAST_BYTES:
        return None
    arithmetic = f"{units.duration(spent)} × {GONE} = {units.duration(GONE * spent)} of GPU time"
    saving = reckoned(facts, LEVERS, GONE * spent, arithmetic, LOW)
    took = f": {units.duration(spent)}" if spent else ""
    held = f", {units.size(n_bytes)} of memory" if n_bytes else ""
    return finding(
        facts,
        __name__,
        f"the loss holds all logits in fp32{took}{held}",
        saving,
        (MEMORY_BOUND, BELOW_BANDWIDTH),
        saving_bytes=n_bytes,
        evidence=measured.told(whole),
        levers=LEVERS,
        code=CODE,
    )


def _over_logits(kernel: Kernel) -> bool:
    return kernel.kind == LOSS and _WHOLE.search(kernel.name) is not None


def _logits_bytes(facts: Facts) -> int:
    """Logits and their gradient, from the product with the most columns that is no square: the head's."""
    products = facts.details.products if facts.details is not None else ()
    heads = [p.m * p.n for p in products if p.batch == 1 and p.n > 4 * p.k]
    return 2 * 4 * max(heads, default=0)
