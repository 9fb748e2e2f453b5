"""What the tuner asks for, and what carrying it out gives: the words between `advice.tuner` and whoever has the processes."""

import msgspec

from flopwise.advice.gather import Inspection
from flopwise.advice.moves import Move
from flopwise.capture.interleave import PairMeasured
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
    budget_s: float = 600.0  # no lever is begun after it
    seconds: float = 3.0  # of sampling, for each lever
    logs: str = ""  # the folder with the processes' output

    @property
    def on_gpu(self) -> bool:
        return self.memory_bytes is not None


class WriteReference(msgspec.Struct, frozen=True, kw_only=True):
    """Write down this step's losses and gradients. Gives a ReferenceWritten."""

    workload: Workload


class MeasureAlone(msgspec.Struct, frozen=True, kw_only=True):
    """Measure a step with nothing else on the device. Gives a Measured."""

    workload: Workload
    group: str
    samples: int  # at least
    trace: bool = False  # as well, and inspect it
    check: bool = False  # its results against the reference
    move: Move | None = None  # None: it is the step to start from


class MeasurePair(msgspec.Struct, frozen=True, kw_only=True):
    """Run the best step so far and a challenger interleaved. Gives a PairMeasured."""

    move: Move
    group: str
    rounds: int  # at least
    check: bool = False
    more: bool = False  # with the pair that is running already

    @property
    def workload(self) -> Workload:
        return self.move.workload


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """End all processes, and trace the last step if it is named. Gives a Finished."""

    stopped: str
    trace: Workload | None = None


class ReferenceWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The reference's own losses and gradients, or why there are none."""

    agreement: Agreement | None = None
    error: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was measured alone; `inspection` is there if it was traced, or is the first."""

    point: Point
    agreed: AgreementResult = AgreementResult()
    inspection: Inspection | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The trace of the last step, and of every measurement why the GPU's clock was held down."""

    waterfall: Waterfall | None = None
    throttle: tuple[tuple[str, ...], ...] = ()


Action = WriteReference | MeasureAlone | MeasurePair | Finish
Result = ReferenceWritten | Measured | PairMeasured | Finished
