"""The optimizer's operations in another of its forms: what the shape simulator makes of the same weights."""

from collections.abc import Sequence

import msgspec

from flopwise.errors import Unsupported
from flopwise.predict.shapes import adamw
from flopwise.predict.shapes.tape import Parameter, Tape
from flopwise.records.prediction import PredictedStep, Weight
from flopwise.spec.recipe import OWN_OPTIMIZERS, WITH_MASTERS, Recipe
from flopwise.work.operation import OPTIMIZER, OpWork

_STATES = 2  # of Adam's: tensors as large as the weight


def recorded_form(ops: Sequence[OpWork]) -> str:
    """The recipe's word for the optimizer that was recorded; '' where there is none.

    >>> recorded_form([OpWork(op="_foreach_lerp_", module="", phase="optimizer", kind="optimizer", dtype="fp32")])
    'foreach'
    """
    names = {op.op for op in ops if op.phase == OPTIMIZER and op.kernels}
    for mark, form in (("flopwise::adamw", "flopwise"), ("_fused", "fused"), ("_foreach", "foreach")):
        if any(name.startswith(mark) for name in names):
            return form
    return "adamw-loop" if names else ""


def with_optimizer(ops: Sequence[OpWork], recipe: Recipe, written: Recipe, step: PredictedStep) -> Sequence[OpWork]:
    """The step with the recipe's optimizer.

    One that the step's own code fuses on a GPU alone is not fused in a dry run: what the code does is known by `written`. In a
    graph, foreach counts its steps on the device, which takes more kernels.
    """
    form, wanted, updated = recorded_form(ops), recipe.optimizer, _updated(ops, step.weights)
    as_written = wanted == written.optimizer and (form == wanted or wanted in ("adamw-loop", "foreach"))
    counts = form == "foreach" and recipe.graph == "on" != written.graph and _is_adam(ops, updated)
    if as_written and not counts:
        return ops
    if recipe.precision in WITH_MASTERS and wanted not in OWN_OPTIMIZERS:
        raise Unsupported(
            f"precision = '{recipe.precision}' needs masters, and {wanted} keeps none", "optimizer = flopwise"
        )
    if not updated or not _is_adam(ops, updated):
        raise Unsupported(
            "no Adam or AdamW was recorded in this step", "measure it: other optimizers are not predicted"
        )
    made = _made(updated, recipe)
    first = next(place for place, op in enumerate(ops) if op.phase == OPTIMIZER)
    kept = [op for op in ops[first:] if op.phase != OPTIMIZER]
    return [*ops[:first], *made, *kept]


def _updated(ops: Sequence[OpWork], weights: Sequence[Weight]) -> list[Weight]:
    touched = {tensor for op in ops if op.phase == OPTIMIZER for tensor, _ in (*op.reads, *op.writes)}
    return [weight for weight in weights if weight.tensor in touched]


def _is_adam(ops: Sequence[OpWork], updated: Sequence[Weight]) -> bool:
    """Whether an update reads two tensors of state for each weight, besides its gradient."""
    made, read = set[int](), set[int]()
    for op in ops:
        if op.phase == OPTIMIZER:
            read |= {tensor for tensor, size in op.reads if size > 4} - made
            made |= {tensor for tensor, _ in op.writes} - read
    large = sum(weight.elements > 1 for weight in updated)
    return len(read) >= (2 + _STATES) * large


def _made(updated: Sequence[Weight], recipe: Recipe) -> list[OpWork]:
    t = Tape()
    t.phase = OPTIMIZER
    numbers, parameters = dict[int, int](), []
    for weight in updated:
        tensor = t.tensor(weight.shape, weight.dtype)
        numbers[tensor.storage.number] = weight.tensor
        parameters.append(Parameter(weight.module, tensor))
    adamw.step(t, parameters, recipe)
    return [
        msgspec.structs.replace(
            op,
            reads=tuple((numbers.get(tensor, tensor), size) for tensor, size in op.reads),
            writes=tuple((numbers.get(tensor, tensor), size) for tensor, size in op.writes),
        )
        for op in t.ops
    ]
