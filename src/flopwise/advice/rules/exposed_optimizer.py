"""The optimizer runs alone, after a backward pass beside which it could run.

Looks for: an optimizer that takes 5 % of the step or more, and a backward pass that is not compiled whole: that one hands
over all gradients at its end. Not with fp16: loss scaling looks at all gradients before any update.
Saving: the step with the weights updated within the backward pass, by the model; from a trace alone, a fifth of the smaller
of two: the optimizer's time, and that of backward's matmuls and attention. The gradients' memory besides.
Mend: one optimizer for every block, stepped by `register_post_accumulate_grad_hook` on a second stream.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import saved_bytes
from flopwise.advice.savings import finding, reckoned
from flopwise.predict.constants import OVERLAP_SHARE
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import OPTIMIZER_PART
from flopwise.spec.recipe import Recipe
from flopwise.trace.phases import BACKWARD, OPTIMIZER
from flopwise.work.operation import ATTENTION, MATMUL

LEAST = 0.05  # of the step
LEVERS = {"overlap": "on"}
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


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    recipe, step = measured.recipe_of(facts), measured.step_ns(facts)
    exposed = _exposed_ns(facts)
    if not step or exposed < LEAST * step or not _could(recipe):
        return None
    beside = min(exposed, measured.class_ns(facts, MATMUL, ATTENTION, phase=BACKWARD))
    arithmetic = (
        f"{OVERLAP_SHARE:g} × the smaller of the optimizer's {units.duration(exposed)} and of backward's matmuls and attention: "
        f"{units.duration(OVERLAP_SHARE * beside)}"
    )
    return finding(
        facts,
        __name__,
        f"the optimizer runs alone for {units.duration(exposed)}, {units.percent(exposed / step, 0)} of the step",
        reckoned(facts, LEVERS, OVERLAP_SHARE * beside, arithmetic, LOW),
        (OPTIMIZER_PART,),
        evidence=measured.told(measured.kernels(facts, lambda kernel: kernel.kind == OPTIMIZER)),
        levers=LEVERS,
        code=CODE,
        saving_bytes=saved_bytes(facts, LEVERS),
        confidence=LOW,  # how much two kernels gain beside each other is the GPU's to say
    )


def _exposed_ns(facts: Facts) -> float:
    """The optimizer's time with nothing beside it, as far as anyone says."""
    if facts.waterfall is not None:
        return facts.waterfall.ns(OPTIMIZER_PART)
    return measured.phase_ns(facts, OPTIMIZER)


def _could(recipe: Recipe | None) -> bool:
    """Whether the levers leave room for it; of a trace of unknown origin nobody knows."""
    if recipe is None:
        return True
    return recipe.overlap == "off" and recipe.precision != "fp16" and recipe.compile in ("off", "blocks")
