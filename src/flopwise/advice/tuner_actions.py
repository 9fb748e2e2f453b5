"""What the tuner asks for, and what carrying it out gives: the words between `advice.tuner` and whoever has the processes."""

import msgspec

from flopwise.advice.gather import Inspection
from flopwise.advice.moves import Move
from flopwise.capture.interleave import Contested
from flopwise.records.events import AgreementResult
from flopwise.records.run import Agreement, Point
from flopwise.records.waterfall import Waterfall
from flopwise.spec.gpu import Gpu
from flopwise.spec.workload import Workload


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, and the machine."""

    start: Workload
    gpu_name: str = "cpu"
    gpu: Gpu | None = None  # as predictions know it
    memory_bytes: int | None = None  # of the GPU; None: on the CPU
    limit_bytes: int | None = None  # the most a step may hold
    keep_exact: bool = False
    allow: tuple[str, ...] = ()  # what is tried on request only: of `moves.ON_REQUEST`
    budget_s: float = 600.0  # no lever is begun after it
    logs: str = ""  # the folder with the processes' output

    @property
    def on_gpu(self) -> bool:
        return self.memory_bytes is not None


class WriteReference(msgspec.Struct, frozen=True, kw_only=True):
    """Write down this step's losses and gradients. Gives a ReferenceWritten."""

    workload: Workload
    levers: dict[str, str] = {}  # which of these can the step not have
    precisions: tuple[str, ...] = ()  # in which plain PyTorch's rounding is measured as well


class MeasureStart(msgspec.Struct, frozen=True, kw_only=True):
    """Measure the step to start from, and inspect it. Gives a Measured."""

    workload: Workload
    samples: int  # at least
    trace: bool = False  # as well
    check: bool = False  # its results against the reference


class MeasurePair(msgspec.Struct, frozen=True, kw_only=True):
    """Measure the best step so far against a challenger, in pairs of processes. Gives a Contested."""

    move: Move
    group: str
    error_rate: float  # of the verdict
    together: bool = True  # both fit the device at once
    check: bool = False

    @property
    def workload(self) -> Workload:
        return self.move.workload


class Prove(msgspec.Struct, frozen=True, kw_only=True):
    """Measure the first step against the best: what all levers are worth together. Gives a Contested."""

    start: Workload
    best: Workload
    together: bool


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """End all processes, and trace the last step if it is named. Gives a Finished."""

    stopped: str
    trace: Workload | None = None


class ReferenceWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The reference's own losses and gradients, or why there are none."""

    agreement: Agreement | None = None
    error: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The first step; `inspection` is there if it ran."""

    point: Point
    agreed: AgreementResult = AgreementResult()
    inspection: Inspection | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The trace of the last step, and of every measurement why the GPU's clock was held down."""

    waterfall: Waterfall | None = None
    throttle: tuple[tuple[str, ...], ...] = ()


Action = WriteReference | MeasureStart | MeasurePair | Prove | Finish
Result = ReferenceWritten | Measured | Contested | Finished
