"""The reference of `tune`: the step as it is written, run more than once, so that its rounding is measured and not assumed."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from flopwise.capture.build import build_step
from flopwise.capture.compared_steps import STEPS, UPDATE_STEPS, FollowedSteps, StepFollower, follow_steps
from flopwise.capture.differences import Distance, assumed, distance
from flopwise.capture.fp8_rounding import round_to_fp8
from flopwise.capture.seen_step import watch_step
from flopwise.errors import FlopwiseError
from flopwise.lm.precision import apply_fp32_matmul
from flopwise.records.run import GRADIENT
from flopwise.spec.dtypes import dtype_name
from flopwise.spec.recipe import FP8, Recipe
from flopwise.spec.workload import UserStep, Workload, varied

# The share by which weights are changed to see what rounding does: half a unit in the last place of a half precision. In fp32
# 16 times that: kernels that add up in another order differ by more than one rounding.
PERTURBED = {"bf16": 2.0**-9, "fp16": 2.0**-12, "tf32": 2.0**-12}
PERTURBED_FP32 = 2.0**-20
OURS = 4.0  # times the error of plain autocast: at most what bf16 weights with masters have, on a user's step
AS_WRITTEN = "as written"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING_STEPS, AGAIN_STEPS = max(UPDATE_STEPS), 2  # of the runs that only tell how far right steps may be off
ASSUMED = {
    "fp32": 1e-4,
    "tf32": 2e-3,
    "fp16": 5e-3,
    "bf16": 2e-2,
    "fp8": 1e-1,
}  # of gradients, where it cannot be measured
NOT_THE_SAME = 0.1  # of the loss or the gradients of the first two steps: another step, or the same on other data
PLAIN = {"bf16-master": "bf16-pure"}  # what plain PyTorch has instead of a precision of ours, for our own model


class Rounding(msgspec.Struct, frozen=True, kw_only=True):
    """How far right steps are from the truth."""

    compute: str = ""  # the dtype that the step as written computes in
    written: list[Distance] = []  # the step as it is written, each time it was run; none where it is not the same twice
    reseeded: list[Distance] = []  # with other random numbers, where it draws some
    precisions: dict[str, Distance] = {}  # of plain PyTorch in these
    near: dict[str, Distance] = {}  # to exact arithmetic with rounded weights: of these precisions, and of AS_WRITTEN

    def of(self, precision: str, truth: FollowedSteps, *, same_draws: bool = True) -> list[Distance]:
        """What right steps of a precision may show."""
        plain = self.precisions.get(precision, self.precisions.get(PLAIN.get(precision, "")))
        known = [*self.written, *([plain] if plain is not None else [])]
        computes = {precision.partition("-")[0], self.compute}
        if not self.written or (plain is None and computes != {"fp32"} and self.compute not in PERTURBED):
            known.append(assumed(truth, max(ASSUMED.get(compute, ASSUMED["fp32"]) for compute in computes)))
        return [*known, *([] if same_draws else self.reseeded)]

    def near_by(self, precision: str) -> str:
        """Which of `near` a precision has; '': none."""
        names = (precision, PLAIN.get(precision, ""), AS_WRITTEN) if precision not in FP8 else ()
        return next((name for name in names if name in self.near), "")


class Reference(NamedTuple):
    """What is right, and how far from it right steps are."""

    truth: FollowedSteps
    rounding: Rounding
    rounded: dict[str, FollowedSteps]  # the truth with rounded weights, by the names in `Rounding.near`


def run_reference(workload: Workload, device: torch.device, precisions: tuple[str, ...]) -> Reference:
    """The step as written, twice; exact, or with its weights perturbed; and in each of `precisions`.

    The truth is the step as written, without its autocast and TF32 if it has them. Each run builds the step anew.
    """
    written, compute, tf32 = _as_written(workload, device)
    if written.problem():
        return Reference(written, Rounding(), {})
    exact = _exact_truth(workload, device, written) if compute in HALF or tf32 else None
    if tf32:
        apply_fp32_matmul(Recipe(precision="tf32"))
    truth, again = exact or written, _tried(workload, device, AGAIN_STEPS)
    if again is None or not _repeats(distance(again, written)):
        return Reference(truth, Rounding(compute=compute), {})
    as_written = {"again": again} | (_perturbed(workload, device, compute) if exact is None else {})
    reseeded = _tried(workload, device, ROUNDING_STEPS, seed=1) if written.draws else None
    runs = _named(AS_WRITTEN, written if exact is not None else None)
    runs |= _in_precisions(workload, device, compute, precisions)
    rounded = _rounded(workload, device, compute, list(runs))  # last: they leave TF32 off
    return _reference(truth, compute, as_written, runs, rounded, _named("", reseeded))


def _reference(
    truth: FollowedSteps,
    compute: str,
    as_written: dict[str, FollowedSteps],
    runs: dict[str, FollowedSteps],
    rounded: dict[str, FollowedSteps],
    reseeded: dict[str, FollowedSteps],
) -> Reference:
    far = _without_ours({name: distance(one, truth) for name, one in (as_written | runs).items()})
    rounded = {name: one for name, one in rounded.items() if name in far}
    rounding = Rounding(
        compute=compute,
        written=[far.pop(name) for name in (*as_written, AS_WRITTEN) if name in far],
        reseeded=[distance(one, truth) for one in reseeded.values()],
        precisions=far,
        near={name: distance(runs[name], one) for name, one in rounded.items()},
    )
    return Reference(truth, rounding, rounded)


def _in_precisions(
    workload: Workload, device: torch.device, compute: str, precisions: tuple[str, ...]
) -> dict[str, FollowedSteps]:
    """In plain PyTorch; what is the step as written, or more exact than it, is left out. Of fp8, what its rounding gives."""
    names = dict.fromkeys(_plain(workload, precision) for precision in precisions)
    less = {workload.recipe.precision, compute} | ({"tf32"} if compute in HALF else set())
    runs = {name: _run_in_precision(workload, name, device) for name in names if name not in less}
    return {name: one for name, one in runs.items() if one is not None}


def _run_in_precision(workload: Workload, name: str, device: torch.device) -> FollowedSteps | None:
    if name not in FP8:
        return _tried(_in_precision(workload, name), device, ROUNDING_STEPS)
    own = not isinstance(workload.subject, UserStep)  # others' weights are never cast in plain PyTorch
    change = partial(round_to_fp8, by_rows=name == "fp8-rowwise", own=own)
    return _tried(
        _in_precision(workload, PLAIN["bf16-master"] if own else "bf16"), device, ROUNDING_STEPS, change=change
    )


def _rounded(workload: Workload, device: torch.device, compute: str, names: list[str]) -> dict[str, FollowedSteps]:
    """The first step in exact arithmetic, with weights as each of these runs rounds them."""
    found: dict[str, FollowedSteps] = {}
    for name in names:
        dtype = HALF.get((compute if name == AS_WRITTEN else name).partition("-")[0])
        if dtype is not None:
            change = partial(round_weights, dtype=dtype, everything="-" in name)
            found |= _named(name, _exact(workload, device, 1, change=change))
    return found


def _plain(workload: Workload, precision: str) -> str:
    """What plain PyTorch has instead of a precision of ours; a user's step cannot be run in that."""
    return precision if isinstance(workload.subject, UserStep) else PLAIN.get(precision, precision)


def _without_ours(far: dict[str, Distance]) -> dict[str, Distance]:
    """What is ours does not say by itself how far it may be off: plain autocast does."""
    cast = next((far[name] for name in (AS_WRITTEN, "bf16") if name in far), None)
    ours, plain = (one.of(GRADIENT, 1) if one is not None else None for one in (far.get("bf16-master"), cast))
    wrong = ours is not None and (plain is None or ours.overall > OURS * plain.overall)
    return {name: one for name, one in far.items() if not (wrong and name == "bf16-master")}


def _named(name: str, found: FollowedSteps | None) -> dict[str, FollowedSteps]:
    return {} if found is None else {name: found}


def _perturbed(workload: Workload, device: torch.device, compute: str) -> dict[str, FollowedSteps]:
    change = partial(perturb, share=PERTURBED.get(compute, PERTURBED_FP32))
    return _named("perturbed", _tried(workload, device, ROUNDING_STEPS, change=change))


def _exact(workload: Workload, device: torch.device, steps: int = STEPS, **options: Any) -> FollowedSteps | None:
    """The step as written in exact arithmetic, as far as that can be had."""
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with autocast_watched(off=True), eager:  # what is compiled has its autocast compiled in
        return _tried(workload, device, steps, tf32=False, **options)


def _exact_truth(workload: Workload, device: torch.device, written: FollowedSteps) -> FollowedSteps | None:
    """None where that makes no difference: a step's casts need not be autocast's."""
    exact = _exact(workload, device)
    return None if exact is None or _is_zero(distance(written, exact)) else exact


def _as_written(workload: Workload, device: torch.device) -> tuple[FollowedSteps, str, bool]:
    """What it computes, the dtype of most of its products, and whether TF32 is on."""
    follower = StepFollower()
    with autocast_watched() as entered:
        step = build_step(workload, device, follower)
        followed, ran = follow_steps(step, follower), step.ran()
    compute = dtype_name(entered[0]) if entered else ran.compute or ran.weights
    if isinstance(workload.subject, UserStep) and not followed.problem():
        seen = watch_step(step, device)
        compute = seen.autocast or seen.dtype or compute
    del step, follower
    _free(device)
    return followed, compute, device.type == "cuda" and ran.fp32_matmul == "tf32"


def _free(device: torch.device) -> None:
    """The next step is built where the last one was."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _is_zero(far: Distance) -> bool:
    return not any(far.losses.values()) and not any(one.overall for one in far.quantities)


def _repeats(far: Distance) -> bool:
    gradients = far.of(GRADIENT, 1)
    shares = [*far.losses.values(), gradients.overall if gradients is not None else 0.0]
    return max(shares, default=0.0) < NOT_THE_SAME


def _run(
    workload: Workload, device: torch.device, steps: int = STEPS, *, tf32: bool | None = None, **options: Any
) -> FollowedSteps:
    """What a fresh build of it computes. `tf32`: None leaves it as the build sets it."""
    follower = StepFollower(steps, **options)
    step = build_step(workload, device, follower)
    if tf32 is False:
        apply_fp32_matmul(Recipe())
    followed = follow_steps(step, follower)
    del step, follower
    _free(device)
    return followed


def _tried(workload: Workload | None, device: torch.device, steps: int = STEPS, **options: Any) -> FollowedSteps | None:
    """What it computes; None where it cannot run so, or not to a finite end."""
    if workload is None:
        return None
    try:
        followed = _run(workload, device, steps, **options)
    except Exception:  # noqa: BLE001  a user's code may raise anything when it is built twice, or without its autocast
        return None
    return None if followed.problem() else followed


def _in_precision(workload: Workload, precision: str) -> Workload | None:
    levers = {"precision": precision, "graph": "off", "overlap": "off"}
    try:
        return varied(workload, recipe=msgspec.structs.replace(workload.recipe, **levers))
    except FlopwiseError:  # which does not go with another lever
        return None


# --- what is done to weights, and exact arithmetic


@torch.no_grad()
def perturb(model: nn.Module, share: float) -> None:
    """Multiply every weight by 1 ± up to `share`, the same for the same model."""
    for number, weight in enumerate(model.parameters()):
        generator = torch.Generator(weight.device).manual_seed(number)
        noise = torch.rand(weight.shape, generator=generator, device=weight.device)
        weight.mul_((1 + share * (2 * noise - 1)).to(weight.dtype))


@torch.no_grad()
def round_weights(model: nn.Module, dtype: torch.dtype, everything: bool = False) -> None:
    """Round weights as autocast does before a product: of modules with matrices, but not of embeddings."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        products = not isinstance(module, nn.Embedding) and any(weight.dim() > 1 for weight in own)
        for weight in own if products or everything else ():
            weight.copy_(weight.to(dtype))


@contextmanager
def autocast_watched(*, off: bool = False) -> Iterator[list[torch.dtype]]:
    """While open, every dtype that autocast is entered with is noted; `off`: and it is not entered."""
    seen: list[torch.dtype] = []
    kind: Any = torch.autocast
    entered, left = kind.__enter__, kind.__exit__

    def enter(self: Any) -> Any:
        made = self if off else entered(self)
        if torch.is_autocast_enabled(self.device):
            seen.append(self.fast_dtype)
        return made

    def leave(self: Any, *error: Any) -> Any:
        return None if off else left(self, *error)

    kind.__enter__, kind.__exit__ = enter, leave
    try:
        yield seen
    finally:
        kind.__enter__, kind.__exit__ = entered, left
