"""Norm, activation or RoPE written out in eager PyTorch, where one kernel does it.

Looks for: levers norm, activation or rope at `eager` in a step that is not compiled; in a trace of unknown origin, modules
named after them whose work is three or more kernels a call.
Saving: the step with that lever at `triton`, by the model; from a trace alone, 0.6 of the module's elementwise and reduction
time, an assumption: the pieces read and write every tensor two to three times as often as one kernel does.
Mend: flopwise's kernels (`norm = triton` …), `torch.nn.functional.rms_norm`, or torch.compile.
"""

import re

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Saving, finding, reckoned
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDLE_LAUNCH, MEMORY_BOUND
from flopwise.work.operation import COPY, ELEMENTWISE, REDUCTION

GONE = 0.6
MANY = 3.0  # kernels of a module's call; one forward and one backward are none too many
PIECES = {
    "norm": (re.compile(r"(?i)norm|\bln_"), "y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)"),
    "activation": (
        re.compile(r"(?i)swiglu|gelu|silu|\bact(ivation)?\b"),
        "torch.compile(activation)      # or flopwise.kernels.swiglu.swiglu(gate, up)",
    ),
    "rope": (re.compile(r"(?i)rope|rotary"), "torch.compile(rotate)      # or flopwise.kernels.rope.rope(x, cos, sin)"),
}


def check(facts: Facts) -> tuple[Finding, ...]:
    """Up to one for each piece."""
    recipe = measured.recipe_of(facts)
    if recipe is not None and recipe.compile != "off":
        return ()
    return tuple(found for piece in PIECES if (found := _piece(facts, piece)) is not None)


def _piece(facts: Facts, piece: str) -> Finding | None:
    pattern, code = PIECES[piece]
    spent, kernels, modules = _written_out(facts, pattern)
    recipe, levers = measured.recipe_of(facts), {piece: "triton"}
    if recipe is not None and measured.model_of(facts) is not None:
        if getattr(recipe, piece) != "eager":
            return None
    elif not spent or kernels < MANY * modules:
        return None
    arithmetic = f"{units.duration(spent)} × {GONE} = {units.duration(GONE * spent)} of GPU time"
    saving: Saving = reckoned(facts, levers, GONE * spent, arithmetic, LOW)
    took = f": {units.duration(spent)} in {kernels:.0f} kernels" if spent else ""
    evidence = (f"{piece} = eager in the recipe",) if recipe is not None else (f"modules whose names say {piece}",)
    parts = (BELOW_BANDWIDTH, MEMORY_BOUND, IDLE_LAUNCH)
    title = f"{piece} is written out in eager PyTorch{took}"
    return finding(facts, __name__, title, saving, parts, evidence=evidence, levers=levers, code=code)


def _written_out(facts: Facts, pattern: re.Pattern[str]) -> tuple[float, float, int]:
    """GPU time and kernels of the pieces in modules of that name, and how many such modules and phases there are."""
    if facts.explanation is None:
        return 0.0, 0.0, 0
    kinds = (ELEMENTWISE, REDUCTION, COPY)
    rows = [
        part
        for part in facts.explanation.phase_class_modules
        if part.kind in kinds and pattern.search(part.module.rpartition(".")[2])
    ]
    return sum(p.gpu_ns for p in rows), sum(p.count for p in rows), len({(p.phase, p.module) for p in rows})
