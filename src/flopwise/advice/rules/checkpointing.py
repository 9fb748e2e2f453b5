"""Activations are computed twice although they would fit, or kept although they nearly do not.

Looks for: a recompute phase (or the recipe's checkpoint) where the step's peak without it stays under 90 % of the memory; a
step without it whose memory is above 92 %.
Saving: not needed: the step without checkpointing, by the model, or the recompute phase's time in the trace. Missing: the
memory that segments of √layers blocks save, as predicted; it costs time.
Mend: `checkpoint = off`, or a checkpoint around every block or segment.
"""

import math

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import changed, predicted_step, saved_bytes
from flopwise.advice.savings import finding, reckoned
from flopwise.predict.prediction import peak_bytes
from flopwise.records.finding import HIGH, MEDIUM, Finding
from flopwise.records.waterfall import RECOMPUTATION
from flopwise.trace.phases import RECOMPUTE

FITS, NEAR = 0.90, 0.92  # of the memory
CODE_OFF = "x = block(x)      # instead of: checkpoint(block, x, use_reentrant=False)"
CODE_ON = "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)      # for each block"


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    recipe = measured.recipe_of(facts)
    again = measured.phase_ns(facts, RECOMPUTE)
    if again or (recipe is not None and recipe.checkpoint):
        return _not_needed(facts, again)
    return _missing(facts)


def _memory(facts: Facts) -> int:
    """The GPU's memory: as the driver tells it, else the datasheet's."""
    seen = facts.point.environment.gpu if facts.point is not None and facts.point.environment is not None else None
    gpu = measured.gpu_of(facts)
    return seen.memory_bytes if seen is not None else (gpu.memory_bytes or 0) if gpu is not None else 0


def _not_needed(facts: Facts, again: float) -> Finding | None:
    workload, memory, levers = measured.workload_of(facts), _memory(facts), {"checkpoint": "off"}
    if workload is None or measured.model_of(facts) is None or not memory:
        return None  # whether it would fit cannot be told
    peak = peak_bytes(changed(workload, levers), measured.gpu_of(facts)) or 0
    if peak > FITS * memory:
        return None
    saving = reckoned(facts, levers, again, f"recomputation: {units.duration(again)} of GPU time", MEDIUM)
    took = f" for {units.duration(again)}" if again else ""
    return finding(
        facts,
        __name__,
        f"activations are computed again{took}, although all fit",
        saving,
        (RECOMPUTATION,),
        evidence=(f"without checkpointing the peak is {units.size(peak)} of {units.size(memory)} (predicted)",),
        levers=levers,
        code=CODE_OFF,
    )


def _missing(facts: Facts) -> Finding | None:
    memory, model = _memory(facts), measured.model_of(facts)
    phases = facts.point.memory if facts.point is not None else ()
    peak = max((m.peak_bytes for m in phases), default=0)
    if not memory or peak < NEAR * memory or model is None:
        return None
    levers = {"checkpoint": str(max(1, math.isqrt(model.n_layers)))}
    saved = saved_bytes(facts, levers)
    if not saved:
        return None
    cost = predicted_step(facts, levers)
    price = f"; it costs {units.duration(-cost.saving_ns)} a step" if cost is not None and cost.saving_ns < 0 else ""
    return Finding(
        rule=__name__.rpartition(".")[2],
        title=f"memory is nearly full: {units.size(peak)} of {units.size(memory)}; checkpointing saves {units.size(saved)}",
        saving_bytes=saved,
        arithmetic=f"predicted from shapes: peak with checkpoint = {levers['checkpoint']} is {units.size(saved)} lower{price}",
        evidence=tuple(f"{m.phase}: peak {units.size(m.peak_bytes)}" for m in phases),
        levers=levers,
        code=CODE_ON,
        confidence=HIGH,
    )
