"""The optimizer updates its tensors one by one, or pass by pass, where one fused kernel does.

Looks for: an optimizer phase without fused kernels; many small kernels are a loop over tensors, `multi_tensor_apply` ones
are `foreach`. Without a trace, the recipe's optimizer.
Saving: the step with the fused optimizer, by the model; from a trace alone, its time beyond 28 bytes a parameter at 80 % of
the bandwidth where the parameters are known (four tensors read, three written), else × (1 − 0.37): what fused AdamW takes of
foreach's time (the two H200 traces in tests/trace/fixtures, 1.03 of 2.83 ms).
Mend: `torch.optim.AdamW(…, fused=True)`.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, reckoned
from flopwise.analysis.explanation import Kernel
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDLE_LAUNCH, OPTIMIZER_PART
from flopwise.spec.recipe import SCALES_ON_DEVICE
from flopwise.trace.phases import OPTIMIZER

FUSED_SHARE, BYTES_PER_PARAMETER, REACHED = 0.37, 28, 0.8
LEVERS = {"optimizer": "fused"}
CODE = "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)"


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    recipe, spent = measured.recipe_of(facts), measured.phase_ns(facts, OPTIMIZER)
    how = _how(facts)
    if recipe is not None and recipe.optimizer in SCALES_ON_DEVICE:
        return None
    workload = measured.workload_of(facts)
    asked = facts.explanation is None and recipe is not None and workload is not None and workload.phase == "train"
    if not how and not asked:
        return None
    how = how or {"adamw-loop": "loops over its tensors"}.get(recipe.optimizer if recipe else "", "goes pass by pass")
    gone, arithmetic = _beyond_fused(facts, spent)
    saving = reckoned(facts, LEVERS, gone, arithmetic, MEDIUM)
    took = f": {units.duration(spent)}" if spent else ""
    evidence = measured.told(measured.kernels(facts, _updates))
    parts = (OPTIMIZER_PART, BELOW_BANDWIDTH, IDLE_LAUNCH)
    title = f"the optimizer {how}{took}"
    return finding(facts, __name__, title, saving, parts, evidence=evidence, levers=LEVERS, code=CODE)


def _updates(kernel: Kernel) -> bool:
    return kernel.kind == OPTIMIZER


def _how(facts: Facts) -> str:
    """What the optimizer's kernels say; '' where it is fused, compiled, or none is there."""
    e = facts.explanation
    if e is None or not measured.phase_ns(facts, OPTIMIZER):
        return ""
    updates = [kernel.name.lower() for kernel in e.kernels if _updates(kernel)]
    if any("fused" in name or name.startswith(("triton_", "adamw_", "_adamw")) for name in updates):
        return ""
    if any("multi_tensor_apply" in name for name in updates):
        return "goes over all tensors once for every operation (foreach)"
    count = sum(share.count for share in e.phases if share.name == OPTIMIZER)
    return f"loops over its tensors ({count:.0f} kernels)" if count > 50 else ""


def _beyond_fused(facts: Facts, spent: float) -> tuple[float, str]:
    parameters = facts.point.ran.parameters if facts.point is not None and facts.point.ran is not None else 0
    bandwidth = measured.bandwidth(facts)
    if parameters and bandwidth:
        needed = BYTES_PER_PARAMETER * parameters / (REACHED * bandwidth) * 1e9
        moved = f"{units.count(parameters)} parameters × {BYTES_PER_PARAMETER} B at {REACHED:.0%} of the bandwidth"
        return max(0.0, spent - needed), f"{units.duration(spent)} − {units.duration(needed)} ({moved})"
    gone = spent * (1 - FUSED_SHARE)
    return gone, f"{units.duration(spent)} × (1 − {FUSED_SHARE}) = {units.duration(gone)} of GPU time"
