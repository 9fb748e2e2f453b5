"""One rank of a step that several share: who holds what in parts, what is gathered for a moment, and its part of the update."""

import math

import msgspec

from flopwise.predict.shapes.network import weight_shapes
from flopwise.records.prediction import PredictedStep
from flopwise.records.run import PhaseMemory
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.model import ModelSpec
from flopwise.spec.rank_share import rank_share
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload
from flopwise.work.operation import GATHERED, GRADIENTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARY, Footprint, OpWork

_KEEPS_GRADIENTS = ("ddp", "zero1")  # DDP's buckets, of which the gradients are views, stay from step to step
_AHEAD = 2  # blocks that are gathered at the same time: the one that runs and the next
# Whether a phase begins and ends with gradients: they go at the start of the next step's forward pass.
_GRADIENTS_THERE = {
    "forward": (True, False),
    "loss": (False, False),
    "backward": (False, True),
    "optimizer": (True, True),
}
_Owners = dict[str, int]


def of_one_rank(step: PredictedStep, workload: Workload) -> PredictedStep:
    """The step of `rank_share(workload)`, with the memory that sharing it takes and saves; as it is where nothing is shared."""
    recipe, spec = workload.recipe, rank_share(workload).subject
    if recipe.parallel == "off" or not isinstance(spec, ModelSpec):
        return step
    way = _Way(recipe, spec)
    phases = tuple(way.phase(one) for one in step.phases)
    moments = tuple(way.moment(one) for one in step.moments)
    highest = max(phases, key=lambda one: one.peak_bytes)
    peak = Footprint(moment=step.peak.moment, phase=highest.phase, owners=highest.owners)
    return msgspec.structs.replace(step, ops=way.ops(step.ops), phases=phases, moments=moments, peak=peak)


class _Way:
    def __init__(self, recipe: Recipe, spec: ModelSpec) -> None:
        self.recipe, self.parts = recipe, recipe.data_ranks
        sizes = {name: math.prod(shape) for name, shape in weight_shapes(spec).items()}
        item, computed = item_bytes(recipe.weights), item_bytes("fp32" if recipe.compute == "tf32" else recipe.compute)
        block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
        root = sum(size for name, size in sizes.items() if not name.startswith("blocks."))
        self.gradients = sum(sizes.values()) * item
        self.block, self.root = block * computed, root * computed
        self.sharded = recipe.parallel in ("fsdp2", "fsdp2+tp", "own-fsdp")
        self.state_apart = self.sharded or recipe.parallel in ("zero1", "own-zero1")

    def ops(self, known: tuple[OpWork, ...]) -> tuple[OpWork, ...]:
        """Where each rank updates its part, an update's FLOPs and bytes are in parts, too."""
        if not self.state_apart:
            return known
        return tuple(self._part(op) if op.phase == "optimizer" else op for op in known)

    def _part(self, op: OpWork) -> OpWork:
        sizes = {name: -(-getattr(op, name) // self.parts) for name in ("flops", "read_bytes", "write_bytes")}
        return msgspec.structs.replace(op, **sizes)

    def owners(self, known: _Owners, phase: str, gathered: bool) -> _Owners:
        """Who holds what in a phase; `gathered`: while blocks run."""
        found = dict(known)
        if self.state_apart:
            found[OPTIMIZER_STATE] = -(-found.get(OPTIMIZER_STATE, 0) // self.parts)
            if phase == "optimizer" and TEMPORARY in found:
                found[TEMPORARY] = -(-found[TEMPORARY] // self.parts)
        if self.sharded:
            for owner in (PARAMETERS, GRADIENTS):
                found[owner] = -(-found.get(owner, 0) // self.parts)
            if gathered and phase != "optimizer":
                reduced = self.block if phase == "backward" else 0  # gradients of a block, whole, on their way
                found[GATHERED] = self.root + _AHEAD * self.block + reduced
        if self.recipe.parallel in _KEEPS_GRADIENTS:
            found[GRADIENTS] = self.gradients
        return {owner: size for owner, size in found.items() if size}

    def phase(self, known: PhaseMemory) -> PhaseMemory:
        owners = self.owners(known.owners, known.phase, gathered=True)
        changed = sum(owners.values()) - sum(known.owners.values())
        begins, ends = (self._between(known, there) for there in _GRADIENTS_THERE[known.phase])
        start, end = known.start_bytes + begins, known.end_bytes + ends
        peak = max(known.peak_bytes + changed, start, end)
        owners[TEMPORARY] = owners.get(TEMPORARY, 0) + peak - (known.peak_bytes + changed)
        return msgspec.structs.replace(known, owners=owners, peak_bytes=peak, start_bytes=start, end_bytes=end)

    def _between(self, known: PhaseMemory, gradients: bool) -> int:
        """What sharing adds where no block runs; `gradients`: those of a step are there."""
        lasting = {name: known.owners.get(name, 0) for name in (PARAMETERS, OPTIMIZER_STATE)}
        lasting |= {GRADIENTS: self.gradients} if gradients else {}
        return sum(self.owners(lasting, known.phase, gathered=False).values()) - sum(lasting.values())

    def moment(self, known: Footprint) -> Footprint:
        return msgspec.structs.replace(known, owners=self.owners(known.owners, known.phase, gathered=False))
