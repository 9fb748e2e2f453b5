"""The optimizer updates its tensors one by one, or pass by pass, where one fused kernel does.

Looks for: an optimizer phase without fused kernels; many small kernels are a loop over tensors, PyTorch's `multi_tensor_apply`
ones are `foreach`. Not an optimizer that `torch.optim` has no fused form of (Shampoo), nor another library's (FusedAdam), nor the
communication inside its step. Without a trace, the recipe's optimizer.
Saving: the step with the fused optimizer, by the model; from a trace alone, its time beyond {FUSED_OPTIMIZER_BYTES} bytes a
parameter at {REACHED_BANDWIDTH:%} of the bandwidth where the parameters are known (four tensors read, three written), else
× (1 − {FUSED_OPTIMIZER_SHARE}): what fused AdamW takes of foreach's time (the two H200 traces in tests/trace/fixtures, 1.03 of
2.83 ms).
Fix: `torch.optim.AdamW(…, fused=True)`.
"""

import re

import msgspec

from flopwise import units
from flopwise.advice.constants import FUSED_OPTIMIZER_BYTES, FUSED_OPTIMIZER_SHARE, LOOP_KERNELS, REACHED_BANDWIDTH
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, gpu_time_saved, predicted_or
from flopwise.analysis.explanation import Kernel
from flopwise.records.finding import Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDLE_LAUNCH, OPTIMIZER_PART
from flopwise.spec.recipe import SCALES_ON_DEVICE
from flopwise.trace.phases import OPTIMIZER
from flopwise.work.operation import COMMUNICATION

CODE = "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)"
_FOREIGN = re.compile(r"multi_tensor_apply.*\b(?:adam|lamb|sgd|novograd|adagrad|lion)\w*functor", re.IGNORECASE)
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # of torch.optim, those with a fused implementation
RULE = Rule(__name__, (OPTIMIZER_PART, BELOW_BANDWIDTH, IDLE_LAUNCH), {"optimizer": "fused"}, CODE)


def check(facts: Facts) -> Finding | None:
    recipe, spent = facts.recipe, facts.phase_ns(OPTIMIZER)
    if recipe is not None and recipe.optimizer in SCALES_ON_DEVICE:
        return None
    names = facts.details.optimizers
    how = _by_kernels(facts) or _by_recipe(facts)
    if not how or (names and not any(name in FUSED for name in names)):
        return None
    spent -= facts.class_ns(COMMUNICATION, phase=OPTIMIZER)
    took = f": {units.duration(spent)}" if spent else ""
    saving = predicted_or(facts, RULE.levers, gpu_time_saved(facts, *_beyond_fused(facts, spent)))
    name = next((name for name in names if name in FUSED), "AdamW")
    levers = RULE.levers if name == "AdamW" else {}
    rule = msgspec.structs.replace(RULE, code=CODE.replace("AdamW", name), levers=levers)
    evidence = describe(facts.kernels(_updates))
    return rule.finding(facts, f"the optimizer {how}{took}", saving, evidence, evidence_ns=spent, spent_ns=spent)


def _updates(kernel: Kernel) -> bool:
    return kernel.kind == OPTIMIZER


def _by_kernels(facts: Facts) -> str:
    """What the optimizer's kernels show; '' where it is fused, compiled, or there is none."""
    e = facts.explanation
    if e is None or not facts.phase_ns(OPTIMIZER):
        return ""
    updates = [kernel.name.lower() for kernel in facts.kernels(_updates)]
    if any("fused" in name or name.startswith(("triton_", "adamw_", "_adamw")) for name in updates):
        return ""
    if any(_FOREIGN.search(name) and "at::native" not in name for name in updates):
        return ""  # not PyTorch's own: apex and DeepSpeed fuse with a function of that name
    if any("multi_tensor_apply" in name for name in updates):
        return "goes over all tensors once for every operation (foreach)"
    count = sum(share.count for share in e.phases if share.name == OPTIMIZER)
    return f"loops over its tensors ({count:.0f} kernels)" if count > LOOP_KERNELS else ""


def _by_recipe(facts: Facts) -> str:
    """Without a trace: what the recipe's optimizer does."""
    if facts.explanation is not None or facts.workload is None or facts.workload.phase != "train":
        return ""
    return "loops over its tensors" if facts.workload.recipe.optimizer == "adamw-loop" else "goes pass by pass"


def _beyond_fused(facts: Facts, spent: float) -> tuple[float, str]:
    ran = facts.point.ran if facts.point is not None else None
    if ran is not None and ran.parameters and facts.bandwidth:
        needed = FUSED_OPTIMIZER_BYTES * ran.parameters / (REACHED_BANDWIDTH * facts.bandwidth) * 1e9
        moved = f"{units.count(ran.parameters)} parameters × {FUSED_OPTIMIZER_BYTES} B"
        why = f"{moved} at {units.percent(REACHED_BANDWIDTH, 0)} of the bandwidth"
        return max(0.0, spent - needed), f"{units.duration(spent)} − {units.duration(needed)} ({why})"
    saved = spent * (1 - FUSED_OPTIMIZER_SHARE)
    return saved, f"{units.duration(spent)} × (1 − {FUSED_OPTIMIZER_SHARE}) = {units.duration(saved)} of GPU time"
