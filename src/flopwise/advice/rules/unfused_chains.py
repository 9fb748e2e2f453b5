"""Chains of small kernels that a compiler would join into one.

Looks for: two or more neighbouring kernels of one module that only move memory (elementwise, reductions, copies, norms),
outside the optimizer and outside a written-out attention's softmax, and not yet a compiler's own.
Saving: the compiled step, by the model; from a trace alone half of what the chains take beyond one kernel each: a chain of n
moves its tensors n times, and part of what is between must still be written for the backward pass.
Mend: `torch.compile` the model, or the block that repeats.
"""

import re

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, reckoned
from flopwise.analysis.details import Chain
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDLE_LAUNCH, MEMORY_BOUND

KEPT = 0.5  # of what lies between the kernels of a chain, written all the same
LEVERS = {"compile": "default"}
CODE = """model = torch.compile(model)
# or the block that repeats, which compiles once: for block in model.blocks: block.compile()"""

_INSIDE_ATTENTION = re.compile(r"(?i)softmax|scores|attn_pv")


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    recipe = measured.recipe_of(facts)
    chains = _chains(facts)
    if not chains or (recipe is not None and recipe.compile != "off"):
        return None
    spent, beyond = sum(chain.gpu_ns for chain in chains), sum(chain.removable_ns for chain in chains)
    gone = beyond * (1 - KEPT)
    arithmetic = f"{units.duration(beyond)} beyond one kernel a chain × {1 - KEPT} = {units.duration(gone)} of GPU time"
    saving = reckoned(facts, LEVERS, gone, arithmetic, LOW)
    number = sum(chain.count for chain in chains)
    title = f"{number:.0f} chains of kernels that a compiler would join: {units.duration(spent)}"
    evidence = tuple(_told(chain) for chain in chains[:4])
    parts = (BELOW_BANDWIDTH, MEMORY_BOUND, IDLE_LAUNCH)
    return finding(facts, __name__, title, saving, parts, evidence=evidence, levers=LEVERS, code=CODE)


def _chains(facts: Facts) -> list[Chain]:
    """Without the inside of attention that is written out: a fused kernel mends that, and another rule says so."""
    found = facts.details.chains if facts.details is not None else ()
    return [chain for chain in found if not _INSIDE_ATTENTION.search(chain.module)]


def _told(chain: Chain) -> str:
    where = f"{chain.module or 'outside every module'}, {chain.phase}"
    first = chain.kernels[0][:80] if chain.kernels else ""
    return (
        f"{where}: {chain.count:.0f} × {chain.length} kernels in a row, {units.duration(chain.gpu_ns)} (first: {first})"
    )
