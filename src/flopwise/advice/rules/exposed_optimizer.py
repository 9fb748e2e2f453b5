"""The optimizer runs alone, after a backward pass that it could overlap.

Looks for: an optimizer that takes {OPTIMIZER_SHARE:%} of the step or more, and a backward pass that is not compiled whole:
that one hands over all gradients at its end. Not with fp16: loss scaling looks at all gradients before any update; nor with
several ranks, whose gradients are added up first.
Saving: the step with the weights updated within the backward pass, by the model; from a trace alone, {OVERLAP_SHARE} of the
smaller of two: the optimizer's time, and that of backward's matmuls and attention. The gradients' memory besides.
Fix: one optimizer for every block, stepped by `register_post_accumulate_grad_hook` on a second stream.
"""

import msgspec

from flopwise import units
from flopwise.advice.constants import OPTIMIZER_SHARE, OVERLAP_SHARE
from flopwise.advice.facts import Facts, describe
from flopwise.advice.predicted import saved_bytes
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import OPTIMIZER_PART
from flopwise.spec.recipe import Recipe
from flopwise.trace.phases import BACKWARD, OPTIMIZER
from flopwise.work.operation import ATTENTION, MATMUL

CODE = """side, held = torch.cuda.Stream(), []
def update(optimizer, parameters):        # AdamW(block.parameters(), lr, fused=True): one for every block
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    held.append(([p.grad for p in parameters], side.record_event()))
    optimizer.zero_grad(set_to_none=True)
    if len(held) > 1:                     # gradients are dropped once the backward pass has waited for who reads them
        torch.cuda.current_stream().wait_event(held[0][1])
        held.pop(0)
for p in block.parameters():              # the hook counts, and calls update() at the last gradient of the block
    p.register_post_accumulate_grad_hook(hook)
with torch.cuda.stream(torch.cuda.Stream(priority=-1)):      # else updates hold up the matmuls that come after them
    loss = train_on(batch)                # forward and backward
    torch.cuda.current_stream().wait_stream(side)
held.clear()"""
RULE = Rule(__name__, (OPTIMIZER_PART,), {"overlap": "on"}, CODE)


def check(facts: Facts) -> Finding | None:
    step = facts.step_ns
    exposed = facts.part_ns(OPTIMIZER_PART) if facts.waterfall is not None else facts.phase_ns(OPTIMIZER)
    talks = facts.details.communication_ns > 0  # its gradients are not those of the backward pass until then
    if not step or exposed < OPTIMIZER_SHARE * step or talks or not _can_overlap(facts.recipe):
        return None
    saved = OVERLAP_SHARE * min(exposed, facts.class_ns(MATMUL, ATTENTION, phase=BACKWARD))
    arithmetic = (
        f"{OVERLAP_SHARE:g} × the smaller of the optimizer's {units.duration(exposed)} and of backward's matmuls and "
        f"attention: {units.duration(saved)}"
    )
    title = f"the optimizer runs alone for {units.duration(exposed)}, {units.percent(exposed / step, 0)} of the step"
    saving = predicted_or(facts, RULE.levers, gpu_time_saved(facts, saved, arithmetic))
    # How much two kernels gain from running together differs from GPU to GPU.
    saving = msgspec.structs.replace(saving, confidence=LOW)
    updates, n_bytes = facts.kernels(lambda kernel: kernel.kind == OPTIMIZER), saved_bytes(facts, RULE.levers)
    return RULE.finding(
        facts, title, saving, describe(updates), n_bytes, evidence_ns=exposed, exposed_ns=exposed, step_ns=step
    )


def _can_overlap(recipe: Recipe | None) -> bool:
    """Whether the levers allow it; of a trace of unknown origin that is taken to be so."""
    if recipe is None:
        return True
    return recipe.overlap == "off" and recipe.precision != "fp16" and recipe.compile in ("off", "blocks")
