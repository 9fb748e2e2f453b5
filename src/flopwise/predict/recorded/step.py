"""A user's step as it was recorded, and what it becomes under another recipe.

A dry run says what autocast, or weights in bf16, do to every operation: a step is recorded once for each of these. The other
levers replace some operations by others, which follows from those that were recorded: an optimizer's by its other form's, a
norm's by one kernel. A lever that finds nothing to replace is refused, so that nothing is promised of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flopwise.errors import Unsupported
from flopwise.predict.fusion import block_of_module, repeated_blocks
from flopwise.predict.recorded.attention import with_attention
from flopwise.predict.recorded.checkpoint import with_recomputation
from flopwise.predict.recorded.loss import with_fused_loss
from flopwise.predict.recorded.optimizer import with_optimizer
from flopwise.predict.recorded.pieces import with_activation, with_norm, with_rope
from flopwise.predict.recorded.projections import with_joined_projections
from flopwise.records.prediction import PredictedStep
from flopwise.spec.recipe import FP8, Recipe
from flopwise.spec.workload import UserStep, Workload, varied
from flopwise.work.operation import MATMUL, OPTIMIZER, OpWork

Ops = Sequence[OpWork]
# Recorded apart, and what each needs besides; fp8 on request.
CAST: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16-master": {"optimizer": "flopwise"},
    "fp8": {"optimizer": "flopwise"},
}
_HINT = "measure it: the levers of a step of your own are predicted from what a dry run recorded of it"


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The operations of one step, as written and cast otherwise. Compared by identity, so that what follows can be cached."""

    as_written: PredictedStep
    cast: dict[str, PredictedStep] = {}  # by precision

    def under(self, workload: Workload, recorded: Recipe | None = None) -> PredictedStep:
        """The step under the workload's recipe; its memory is that of the step that was recorded.

        `recorded`: the recipe it was recorded with, where that is not what the code does by itself.
        """
        recipe, written = workload.recipe, recorded or written_recipe(workload)
        step = self._recorded(recipe, written)
        ops: Ops = step.ops
        for lever, (values, change) in _CHANGES.items():
            value = getattr(recipe, lever)
            if value == getattr(written, lever):
                continue
            if value not in values:
                raise Unsupported(f"{lever} = '{value}' cannot be derived from what was recorded", _HINT)
            ops = change(ops, str(value), step)
        ops = with_optimizer(ops, recipe, written, step)
        if recipe.precision == "tf32" != written.precision:
            ops = [_in_tf32(op) for op in ops]
        return msgspec.structs.replace(step, ops=tuple(ops))

    @property
    def blocks(self) -> list[str]:
        """The names of the model's blocks, in their order."""
        return _blocks(self.as_written)

    def with_blocks(self, n: int) -> "RecordedStep":
        """The same step of a model with the first `n` blocks alone."""
        return RecordedStep(
            as_written=_shallow(self.as_written, n), cast={name: _shallow(step, n) for name, step in self.cast.items()}
        )

    def _recorded(self, recipe: Recipe, written: Recipe) -> PredictedStep:
        if recipe.precision == written.precision or (recipe.precision, written.precision) == ("tf32", "fp32"):
            return self.as_written
        if recipe.precision not in self.cast:
            raise Unsupported(f"precision = '{recipe.precision}' was not recorded of this step", _HINT)
        return self.cast[recipe.precision]


def _blocks(step: PredictedStep) -> list[str]:
    block_of = repeated_blocks(step.ops)
    return list(dict.fromkeys(block for op in step.ops if (block := block_of(op)) is not None))


def _shallow(step: PredictedStep, n: int) -> PredictedStep:
    gone = {f"{block}." for block in _blocks(step)[n:]}
    weights = [one for one in step.weights if not _inside(one.module, gone)]
    left = sum(one.elements for one in weights) / max(1, sum(one.elements for one in step.weights))
    ops = [
        _fewer(op, left) if op.kind == OPTIMIZER else op for op in step.ops if not gone or not _inside(op.module, gone)
    ]
    return msgspec.structs.replace(step, ops=tuple(ops), weights=tuple(weights))


def _inside(module: str, blocks: set[str]) -> bool:
    return f"{block_of_module(module)}." in blocks


def _fewer(op: OpWork, left: float) -> OpWork:
    """An operation over all weights, over a part of them."""
    read, written = round(op.read_bytes * left), round(op.write_bytes * left)
    kernels = max(1, round(op.kernels * left)) if op.kernels > 1 else op.kernels
    reads, writes = (some[: round(len(some) * left)] for some in (op.reads, op.writes))
    return msgspec.structs.replace(
        op, read_bytes=read, write_bytes=written, kernels=kernels, reads=reads, writes=writes
    )


def to_record(workload: Workload, allow: Sequence[str] = ()) -> list[Workload]:
    """The workloads whose dry runs make a `RecordedStep`: the step as written, and by precision what is cast otherwise.

    >>> from flopwise.spec.workload import workload
    >>> [one.recipe.precision for one in to_record(workload("py:steps:make"))]
    ['fp32', 'bf16', 'bf16-master']
    """
    written = written_recipe(workload)
    first = varied(workload, recipe=written)
    wanted = [name for name in CAST if name not in FP8 or name in allow]
    others = {name: CAST[name] for name in wanted if name != written.precision}
    return [first, *(varied(first, precision=name, **also) for name, also in others.items())]


def written_recipe(workload: Workload) -> Recipe:
    """What the code does by itself: of a user's step as it was seen, of the transformers library's model the defaults."""
    return workload.subject.written if isinstance(workload.subject, UserStep) else Recipe()


def recorded_step(asked: Sequence[Workload], runs: Sequence[PredictedStep | None]) -> RecordedStep | None:
    """From the dry runs of what `to_record` has asked for; None where the step as written could not be run."""
    found = [(one.recipe.precision, run) for one, run in zip(asked[1:], runs[1:], strict=True) if run is not None]
    return RecordedStep(as_written=runs[0], cast=dict(found)) if runs and runs[0] is not None else None


def _in_tf32(op: OpWork) -> OpWork:
    return msgspec.structs.replace(op, dtype="tf32") if op.kind == MATMUL and op.dtype == "fp32" else op


# What a dry run cannot put in place, as its tensors have neither values nor addresses.
NEEDS_VALUES = ("rope", "projections")
# By lever: the values that can be derived, and how.
_CHANGES: dict[str, tuple[tuple[str | int, ...], Callable[[Ops, str, PredictedStep], Ops]]] = {
    "attention": (("sdpa", "sdpa-flash", "sdpa-cudnn"), with_attention),
    "projections": (("fused",), with_joined_projections),
    "loss": (("fused",), with_fused_loss),
    "norm": (("torch", "triton"), with_norm),
    "activation": (("torch", "triton"), with_activation),
    "rope": (("triton",), with_rope),
    "checkpoint": ((1,), with_recomputation),
}
