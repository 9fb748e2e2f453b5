"""Is a step still correct? Losses, gradients and updates of its first steps, compared with those of a reference."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.compared_steps import FollowedSteps, StepFollower, Values, follow_steps
from flopwise.capture.differences import LEAST, Errors, Near, distance, judged
from flopwise.capture.reference_runs import Reference, Rounding, run_reference
from flopwise.capture.step import Step
from flopwise.capture.user_step import refused_levers
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.records.events import AgreementRequest, AgreementResult
from flopwise.records.run import GRADIENT, Agreement
from flopwise.spec.workload import Trial, Workload

BF16_MOMENTS = 2.0**-8  # the rounding of updates from moments that are kept in bf16


def check_agreement(trial: Trial, request: AgreementRequest) -> Agreement:
    """Run the trial's workload from the seed on and compare; with `request.write` it becomes the reference itself."""
    workload, device = trial.workload, resolve_device(trial.device)
    if request.write:
        reference = run_reference(workload, device, request.precisions)
        _refuse(reference.truth, workload)
        write_reference(request.path, reference)
        refused = refused_levers(workload, device, request.levers)
        return msgspec.structs.replace(compare(reference.truth, reference, workload), refused=refused)
    follower = StepFollower()
    found = follow_steps(build_step(workload, device, follower), follower)
    _refuse(found, workload)
    return compare(found, read_reference(request.path), workload)


def _refuse(found: FollowedSteps, workload: Workload) -> None:
    if found.empty:
        hint = "a step of your own shows them if it returns its loss, or builds its model in the factory"
        raise Unsupported(f"{workload.target} shows neither a loss nor gradients", hint)
    if problem := found.problem():
        raise FlopwiseError(f"{workload.target}: {problem}, so nothing can be compared with it")


def check_running_step(
    step: Step, follower: StepFollower, workload: Workload, request: AgreementRequest, once: Callable[[], object]
) -> AgreementResult:
    """The same for a step that was built with this follower and will be measured afterwards; `once` runs it."""
    found = follow_steps(step, follower, once)
    if problem := found.problem():
        return AgreementResult(failed=f"{workload.target} {problem}" if found.empty else problem)
    return AgreementResult(agreement=compare(found, read_reference(request.path), workload))


def compare(found: FollowedSteps, reference: Reference, workload: Workload) -> Agreement:
    """The errors of a step, each with what rounding alone gives in its precision."""
    truth, rounding, _ = reference
    precision, same_draws = workload.recipe.precision, not truth.draws or found.drawn == truth.drawn
    far = distance(found, truth)
    gradients = far.of(GRADIENT, 1) or Errors(GRADIENT, 1, {}, 0.0, 0.0, 0.0)
    worst = max(gradients.weights, key=gradients.weights.__getitem__, default="")
    common = [step for step in truth.losses if step in found.losses]
    return Agreement(
        losses=tuple(found.losses[step] for step in common),
        reference_losses=tuple(truth.losses[step] for step in common),
        differences=judged(
            far,
            rounding.of(precision, truth, same_draws=same_draws),
            near=_near(found, reference, precision) if same_draws else None,
            later=BF16_MOMENTS if workload.recipe.optimizer == "flopwise-bf16" else LEAST,
        ),
        gradient_error=gradients.overall if gradients.weights else None,
        worst_error=gradients.weights.get(worst, 0.0),
        worst=worst,
        n_weights=len(gradients.weights),
        draws=truth.draws,
        same_draws=same_draws,
    )


def _near(found: FollowedSteps, reference: Reference, precision: str) -> Near | None:
    name = reference.rounding.near_by(precision)
    return Near(distance(found, reference.rounded[name]), reference.rounding.near[name]) if name else None


def write_reference(path: str, reference: Reference) -> None:
    """As a .npz file."""
    truth, rounding, rounded = reference
    arrays: dict[str, Any] = {f"weight:{name}": values.astype(np.float32) for name, values in truth.weights.items()}
    for (kind, step), values in truth.values.items():
        arrays |= {f"value:{kind}:{step}:{name}": one.astype(np.float32) for name, one in values.items()}
    for number, (_, run) in enumerate(rounded.items()):
        gradients = run.values.get((GRADIENT, 1), {})
        arrays |= {f"rounded:{number}:{name}": one.astype(np.float32) for name, one in gradients.items()}
    notes = msgspec.json.encode([truth.losses, truth.sizes, truth.drawn, rounding, list(rounded)])
    with open(path, "wb") as file:
        np.savez(file, notes=np.frombuffer(notes, dtype=np.uint8), **arrays)


def read_reference(path: str) -> Reference:
    """What `write_reference` wrote."""
    Notes = tuple[dict[int, float], dict[str, int], tuple[str, str], Rounding, list[str]]
    with np.load(path, allow_pickle=False) as stored:
        losses, sizes, drawn, rounding, names = msgspec.json.decode(stored["notes"].tobytes(), type=Notes)
        truth, gradients = FollowedSteps(losses, {}, {}, sizes, drawn), [Values() for _ in names]
        for key in stored.files:
            what, _, name = key.partition(":")
            if what == "weight":
                truth.weights[name] = stored[key].astype(np.float64)
            elif what == "value":
                kind, step, name = name.split(":", 2)
                truth.values.setdefault((kind, int(step)), {})[name] = stored[key].astype(np.float64)
            elif what == "rounded":
                number, _, name = name.partition(":")
                gradients[int(number)][name] = stored[key].astype(np.float64)
    runs = (FollowedSteps({}, {(GRADIENT, 1): one}, truth.weights, sizes) for one in gradients)
    return Reference(truth, rounding, dict(zip(names, runs, strict=True)))
