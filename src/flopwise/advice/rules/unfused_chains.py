"""Chains of small kernels that a compiler would join into one.

Looks for: two or more neighbouring kernels of one module that only move memory (elementwise, reductions, copies, norms),
outside the optimizer and outside a written-out attention's softmax, and not yet a compiler's own. Not in the iterations of a
serving engine, nor where CUDA graphs run {REPLAYED_SHARE:%} of the GPU time.
Saving: the compiled step, by the model; from a trace alone {CHAIN_SAVED} of what the chains take beyond one kernel each: a chain
of n moves its tensors n times, and part of what lies between must still be written for the backward pass.
Fix: `torch.compile` the model, or the block that repeats.
"""

import re

from flopwise import units
from flopwise.advice.constants import CHAIN_SAVED
from flopwise.advice.facts import Evidence, Facts, shortened
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.analysis.details import Chain
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDLE_LAUNCH, MEMORY_BOUND

CODE = """model = torch.compile(model)
# or the block that repeats, which compiles once: for block in model.blocks: block.compile()"""
RULE = Rule(__name__, (BELOW_BANDWIDTH, MEMORY_BOUND, IDLE_LAUNCH), {"compile": "default"}, CODE)
_INSIDE_ATTENTION = re.compile(r"(?i)softmax|scores|attn_pv")  # a fused kernel fixes that: see naive_attention


def check(facts: Facts) -> Finding | None:
    chains = [chain for chain in facts.details.chains if not _INSIDE_ATTENTION.search(chain.module)]
    compiled = facts.recipe is not None and facts.recipe.compile != "off"
    if not chains or compiled or facts.replays or facts.serves:
        return None
    spent, beyond = sum(chain.gpu_ns for chain in chains), sum(chain.removable_ns for chain in chains)
    saved, number = beyond * CHAIN_SAVED, sum(chain.count for chain in chains)
    arithmetic = (
        f"{units.duration(beyond)} beyond one kernel a chain × {CHAIN_SAVED} = {units.duration(saved)} of GPU time"
    )
    title = f"{units.several(number, 'chain')} of kernels that a compiler would join: {units.duration(spent)}"
    saving = predicted_or(facts, RULE.levers, gpu_time_saved(facts, saved, arithmetic, LOW))
    return RULE.finding(
        facts, title, saving, map(_describe, chains[:4]), evidence_ns=spent, chains=number, spent_ns=spent
    )


def _describe(chain: Chain) -> Evidence:
    where = f"{chain.module or 'outside every module'}, {chain.phase}"
    rows = f"{chain.count:.0f} × {chain.length} kernels in a row, {units.duration(chain.gpu_ns)}"
    first = chain.kernels[0] if chain.kernels else ""
    return Evidence(f"{where}: {rows} (first: {shortened(first)})", first)
