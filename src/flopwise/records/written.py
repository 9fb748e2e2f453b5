"""What really ran, by what was seen of a step; and the recipe that a user's step has by its own code."""

import msgspec

from flopwise.records.run import WRITTEN_OUT, Point, Ran, Seen, SeenOptimizer
from flopwise.spec.dtypes import HALVES
from flopwise.spec.recipe import LEVERS, SCALES_ON_DEVICE, Recipe, levers_to_apply
from flopwise.spec.workload import UserStep, Workload

_FORMS = {"loop": "adamw-loop", "foreach": "foreach", "fused": "fused"}
_OPTIMIZERS = ("Adam", "AdamW", "SGD")  # those of torch.optim that the lever knows
_COMPILED = {"model": "default", "blocks": "blocks"}
_RECOMPUTED = 0.25  # of the useful FLOPs of a forward pass, a third of the step's: less is a detail, not checkpointing


def with_seen(ran: Ran, seen: Seen, workload: Workload) -> Ran:
    """The record of what ran, with what was seen of it in place of what was read off the objects of a user's step."""
    ran = msgspec.structs.replace(ran, seen=seen)
    if seen.problem or not isinstance(workload.subject, UserStep):
        return ran
    ran = msgspec.structs.replace(
        ran,
        parameters=ran.parameters if seen.parameters is None else seen.parameters,
        weights=ran.weights if seen.parameters is None else seen.weights,
        compute="fp32" if seen.dtype == "tf32" else seen.dtype,
        attention=_attention(seen),
        optimizer=", ".join(dict.fromkeys(map(_named, seen.optimizers))) or ran.optimizer,
        checkpointed=ran.checkpointed or seen.checkpoints,
    )
    return msgspec.structs.replace(ran, written=written_recipe(ran, workload.recipe, workload.subject.written))


def _attention(seen: Seen) -> str:
    """
    >>> _attention(Seen(attention=("flash", "math", WRITTEN_OUT)))
    'sdpa: flash, math; written out'
    """
    fused = [kind for kind in seen.attention if kind != WRITTEN_OUT]
    words = [f"sdpa: {', '.join(fused)}"] if fused else []
    return "; ".join([*words, *([WRITTEN_OUT] if WRITTEN_OUT in seen.attention else [])])


def _named(optimizer: SeenOptimizer) -> str:
    return " ".join(filter(None, (optimizer.name, optimizer.form, "capturable" if optimizer.capturable else "")))


def written_recipe(ran: Ran, asked: Recipe, known: Recipe) -> Recipe:
    """What the step's code does already; what cannot be seen has its default.

    `asked`: the recipe that it ran under. `known`: what its code was said to do: what `asked` has otherwise was put onto the
    step, and covers what the code does.

    >>> seen = Seen(flops={"bf16": 90, "fp32": 10}, attention=(WRITTEN_OUT,))
    >>> written_recipe(Ran(device="cuda:0", weights="fp32", seen=seen), Recipe(), Recipe()).changed()
    {'precision': 'bf16', 'attention': 'naive'}
    """
    seen = ran.seen
    if seen is None or seen.problem:
        return known
    found = {
        "precision": _precision(ran.weights, seen),
        "attention": "naive" if WRITTEN_OUT in seen.attention else "sdpa",
        "optimizer": _optimizer(seen),
        "compile": _COMPILED.get(seen.compiled, "off"),
        "checkpoint": int(seen.recomputed_flops > _RECOMPUTED * seen.useful_flops / 3),
        "graph": "on" if seen.replays else "off",
    }
    found |= {lever: getattr(known, lever) for lever in LEVERS if getattr(asked, lever) != getattr(known, lever)}
    if found["precision"] == "fp16" and found["optimizer"] not in SCALES_ON_DEVICE:
        found["graph"] = "off"  # no recipe has the three: what replays is not the whole step
    return msgspec.structs.replace(known, **found)


def _precision(weights: str, seen: Seen) -> str:
    dtype = seen.dtype
    if dtype == "fp8":  # no lever: what is not in fp8 is in the dtype of autocast or of the weights
        dtype = seen.autocast or (weights if weights in HALVES else "bf16")
    if dtype == "bf16" and weights == "bf16":
        return "bf16-master" if any(one.updates == "fp32" for one in seen.optimizers) else "bf16-pure"
    return dtype if dtype in ("tf32", *HALVES) else "fp32"


def _optimizer(seen: Seen) -> str:
    """Of several optimizers, the slowest form: it is the one to change."""
    forms = {one.form for one in seen.optimizers if one.by_torch and one.name in _OPTIMIZERS}
    return next((lever for form, lever in _FORMS.items() if form in forms), "foreach")


def as_written(point: Point) -> Point:
    """The first step of a user's own with the recipe that its code has by itself."""
    work, ran = point.trial.workload, point.ran
    if not isinstance(work.subject, UserStep) or ran is None or ran.written is None:
        return point
    asked = levers_to_apply(work.recipe, work.subject.written)
    recipe = msgspec.structs.replace(ran.written, **asked)
    subject = msgspec.structs.replace(work.subject, written=ran.written)
    trial = msgspec.structs.replace(point.trial, workload=msgspec.structs.replace(work, recipe=recipe, subject=subject))
    return msgspec.structs.replace(point, trial=trial)
