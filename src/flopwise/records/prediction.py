"""What a step is predicted to do and to hold: one record, whichever of the two predictors made it. No torch here."""

import math

import msgspec

from flopwise.records.run import PhaseMemory
from flopwise.work.operation import Footprint, OpWork

SHAPES, DRY_RUN = "shape simulator", "dry run"  # the predictors
START, AFTER_FORWARD, AFTER_BACKWARD = "start of forward", "after forward", "after backward"  # moments of a step
LARGEST_TENSORS = 2000  # at the peak: enough for every kind of a deep model's layers


class MemoryPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A step's predicted memory: the peak by owner, and phase by phase."""

    source: str  # SHAPES or DRY_RUN
    peak: Footprint
    phases: tuple[PhaseMemory, ...] = ()
    notes: tuple[str, ...] = ()  # where the step that was predicted is not quite the one asked for

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at any moment."""
        return self.peak.total_bytes


class KeptTensors(msgspec.Struct, frozen=True, kw_only=True):
    """What one op of a module keeps for the backward pass, of all layers together."""

    owner: str
    module: str  # without the layer's number
    op: str
    n_bytes: int


class Weight(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One parameter of the model."""

    tensor: int  # its number in the operations' `reads` and `writes`
    shape: tuple[int, ...]
    dtype: str
    module: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class PredictedStep(MemoryPrediction, frozen=True, kw_only=True):
    """One steady step: its operations in order, and who holds every byte when."""

    ops: tuple[OpWork, ...]
    moments: tuple[Footprint, ...]  # START, AFTER_FORWARD, AFTER_BACKWARD, after the optimizer: those there are
    parameters: int  # a shared one counted once
    kept: tuple[KeptTensors, ...] = ()
    weights: tuple[Weight, ...] = ()  # where the operations say which tensors they read: the dry run of a user's step
    architecture: str = ""  # that was imitated

    @property
    def start(self) -> Footprint:
        """Weights, state and data; the last step's gradients are gone."""
        first = self.moments[0]
        return first if self.after_forward else msgspec.structs.replace(first, moment="start of the step")

    @property
    def after_forward(self) -> Footprint | None:
        """None: no part of the step is known as the forward pass."""
        return self._at(AFTER_FORWARD)

    @property
    def after_backward(self) -> Footprint | None:
        """None: there is no backward pass, or nothing after it."""
        return self._at(AFTER_BACKWARD)

    def _at(self, moment: str) -> Footprint | None:
        return next((one for one in self.moments if one.moment == moment), None)

    def flops(self, *phases: str) -> int:
        """The FLOPs of some phases, or of all."""
        return sum(op.flops for op in self.ops if not phases or op.phase in phases)

    def how(self) -> str:
        """How it was predicted, where a reader has to know."""
        return ""

    def memory(self) -> MemoryPrediction:
        """The memory alone, for whoever stores or shows it."""
        return MemoryPrediction(source=self.source, peak=self.peak, phases=self.phases, notes=self.notes)


class LiveTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that was there at the peak or after forward, and where it came from."""

    bytes: int
    owner: str
    op: str  # that made it; '' before the first step
    module: str
    phase: str  # '' before the first step
    shape: tuple[int, ...]
    dtype: str


class DryRun(PredictedStep, frozen=True, kw_only=True):
    """A step on fake tensors, as it would go on a GPU once it runs steadily, tensor by tensor.

    Bytes are the allocator's: of every block, with its rounding. The parts of `live` always sum to what is allocated.
    """

    workload: str  # its label
    torch: str  # the version whose ops these are
    live: dict[str, tuple[int, ...]]  # owner -> bytes while each op ran, with its results; owners without any left out
    peak_op: int  # the op during which the peak was reached
    largest: tuple[LiveTensor, ...]  # at the peak, largest first
    saved: tuple[LiveTensor, ...] = ()  # what forward and loss have made and backward finds, largest first
    parameters_bytes: int  # requested, without rounding
    gradients_bytes: int
    optimizer_bytes: int
    attention: tuple[str, ...] = ()  # SDPA's backends that were used

    def how(self) -> str:
        return f"predicted by a dry run on fake tensors (torch {self.torch}, as on {self.architecture})"
