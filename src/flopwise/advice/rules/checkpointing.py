"""Activations are computed twice although they would fit, or kept although they nearly do not.

Looks for: a recompute phase (or the recipe's checkpoint) where the step's peak without it stays under {FITS_SHARE:%} of the
memory; a step without it whose memory is above {NEARLY_FULL_SHARE:%}.
Saving: not needed: the step without checkpointing, by the model, or the recompute phase's time in the trace. Missing: the
predicted memory that segments of √layers blocks save; it costs time.
Fix: `checkpoint = off`, or a checkpoint around every block or segment.
"""

import math

from flopwise import units
from flopwise.advice.constants import FITS_SHARE, NEARLY_FULL_SHARE
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import changed, predicted_change, saved_bytes
from flopwise.advice.savings import Rule, gpu_time_saved, memory_saved, predicted_or
from flopwise.predict.prediction import peak_bytes
from flopwise.records.finding import HIGH, Finding
from flopwise.records.waterfall import RECOMPUTATION
from flopwise.trace.phases import RECOMPUTE

CODE_OFF = "x = block(x)      # instead of: checkpoint(block, x, use_reentrant=False)"
NOT_NEEDED = Rule(__name__, (RECOMPUTATION,), {"checkpoint": "off"}, CODE_OFF)
CODE_ON = "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)      # for each block"


def check(facts: Facts) -> Finding | None:
    again = facts.phase_ns(RECOMPUTE)
    checkpointed = again or (facts.recipe is not None and facts.recipe.checkpoint)
    return _not_needed(facts, again) if checkpointed else _missing(facts)


def _memory(facts: Facts) -> int:
    """The GPU's memory: as the driver reports it, else the datasheet's."""
    environment = facts.point.environment if facts.point is not None else None
    if environment is not None and environment.gpu is not None:
        return environment.gpu.memory_bytes
    return (facts.gpu.memory_bytes or 0) if facts.gpu is not None else 0


def _not_needed(facts: Facts, again: float) -> Finding | None:
    memory, levers = _memory(facts), NOT_NEEDED.levers
    if facts.workload is None or facts.model is None or not memory:
        return None  # whether it would fit is unknown
    peak = peak_bytes(changed(facts.workload, levers), facts.gpu)
    if peak is None or peak > FITS_SHARE * memory:
        return None
    traced = gpu_time_saved(facts, again, f"recomputation: {units.duration(again)} of GPU time")
    took = f" for {units.duration(again)}" if again else ""
    saving = predicted_or(facts, levers, traced)
    evidence = (f"without checkpointing the predicted peak is {units.size(peak)} of {units.size(memory)}",)
    title = f"activations are computed again{took}, although all fit"
    return NOT_NEEDED.finding(
        facts, title, saving, evidence, evidence_ns=again, recompute_ns=again, peak_bytes=peak, memory_bytes=memory
    )


def _missing(facts: Facts) -> Finding | None:
    memory, peak = _memory(facts), max((m.peak_bytes for m in facts.memory), default=0)
    if not memory or peak < NEARLY_FULL_SHARE * memory or facts.model is None:
        return None
    levers = {"checkpoint": str(max(1, math.isqrt(facts.model.n_layers)))}
    saved = saved_bytes(facts, levers)
    if not saved:
        return None
    cost = predicted_change(facts, levers)
    price = f"; it costs {units.duration(-cost.saving_ns)} a step" if cost is not None and cost.saving_ns < 0 else ""
    full = f"memory is nearly full: {units.size(peak)} of {units.size(memory)}"
    title = f"{full}; checkpointing saves {units.size(saved)}"
    lower = f"predicted peak with checkpoint = {levers['checkpoint']}: {units.size(saved)} lower"
    saving = memory_saved(f"{lower}{price}", HIGH)
    evidence = (f"{m.phase}: peak {units.size(m.peak_bytes)}" for m in facts.memory)
    missing = Rule(__name__, levers=levers, code=CODE_ON)
    return missing.finding(facts, title, saving, evidence, saved, peak_bytes=peak, memory_bytes=memory)
