"""Norm, activation or RoPE written out in eager PyTorch, where one kernel does it.

Looks for: levers norm, activation or rope at `eager` in a step that is not compiled; in a trace of unknown origin, modules
named after them whose work is {EAGER_KERNELS:g} or more kernels in a row.
Saving: the step with that lever at `triton`, by the model; from a trace alone, {EAGER_SAVED} of the module's elementwise and
reduction time, an assumption: the pieces read and write every tensor two to three times as often as one kernel does.
Fix: flopwise's kernels (`norm = triton` …), `torch.nn.functional.rms_norm`, or torch.compile.
"""

import re

from flopwise import units
from flopwise.advice.constants import EAGER_KERNELS, EAGER_SAVED
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDLE_LAUNCH, MEMORY_BOUND

PARTS = (BELOW_BANDWIDTH, MEMORY_BOUND, IDLE_LAUNCH)
_ACTIVATION = "torch.compile(activation)      # or flopwise.kernels.swiglu.swiglu(gate, up)"
PIECES = {  # the lever: the modules that it is about, and the line that fixes it by hand
    "norm": (r"norm|\bln_", "y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)"),
    "activation": (r"swiglu|gelu|silu|\bact(ivation)?\b", _ACTIVATION),
    "rope": (r"rope|rotary", "torch.compile(rotate)      # or flopwise.kernels.rope.rope(x, cos, sin)"),
}


def check(facts: Facts) -> tuple[Finding, ...]:
    """Up to one for each piece."""
    if facts.serves or facts.replays or (facts.recipe is not None and facts.recipe.compile != "off"):
        return ()
    return tuple(found for piece in PIECES if (found := _piece(facts, piece)) is not None)


def _piece(facts: Facts, piece: str) -> Finding | None:
    pattern, code = PIECES[piece]
    spent, kernels = _eager(facts, re.compile(pattern, re.IGNORECASE))
    recipe, rule = facts.recipe, Rule(__name__, PARTS, {piece: "triton"}, code)
    if recipe is not None and facts.model is not None:
        if getattr(recipe, piece) != "eager":
            return None
    elif not spent:
        return None
    saved = EAGER_SAVED * spent
    arithmetic = f"{units.duration(spent)} × {EAGER_SAVED} = {units.duration(saved)} of GPU time"
    took = f": {units.duration(spent)} in {kernels:.0f} kernels" if spent else ""
    saving = predicted_or(facts, rule.levers, gpu_time_saved(facts, saved, arithmetic, LOW))
    evidence = (f"{piece} = eager in the recipe" if recipe is not None else f"modules named after {piece}",)
    title = f"{piece} is written out in eager PyTorch{took}"
    return rule.finding(facts, title, saving, evidence, evidence_ns=spent, spent_ns=spent, kernels=kernels)


def _eager(facts: Facts, pattern: re.Pattern[str]) -> tuple[float, float]:
    """GPU time and number of the kernels that follow one another, enough of them, in modules of that name."""
    rows = [
        chain
        for chain in facts.details.chains
        if chain.length >= EAGER_KERNELS and pattern.search(chain.module.rpartition(".")[2])
    ]
    return sum(chain.gpu_ns for chain in rows), sum(chain.length * chain.count for chain in rows)
