"""A step from the ideal to the measured one, in parts that add up to it."""

import msgspec

from flopwise.records.limit import StepLimit
from flopwise.records.untraced import UntracedStep

# Names of the parts, as stored runs and JSON have them.
IDEAL = "useful FLOPs at the peak rate"
MATMUL_SHAPE = "matmul: shape, tiles and waves"
MATMUL_UNALIGNED = "matmul: unaligned dimensions"
MATMUL_PRECISION = "matmul: low precision not used"
MATMUL_OTHER = "matmul: other"
ATTENTION_PART = "attention"
MEMORY_BOUND = "memory-bound work at full bandwidth"
BELOW_BANDWIDTH = "memory-bound work below bandwidth"
FP8_CASTS = "fp8 casts and scales"
RECOMPUTATION = "recomputation"
OPTIMIZER_PART = "optimizer"
EXPOSED_COMMUNICATION = "exposed communication"
TRANSFERS = "copies between host and GPU"
IDLE_LAUNCH = "idle: late launches"
IDLE_SYNCHRONISATION = "idle: synchronisation"
IDLE_INPUT = "idle: input pipeline"
IDLE_HOST = "idle: host code"
IDLE_COMPILATION = "idle: compilation"
IDLE_ALLOCATOR = "idle: memory allocation"
IDLE_OTHER = "idle: other"
KEYS = {  # in the order of a waterfall
    IDEAL: "ideal",
    MATMUL_SHAPE: "matmul_shape",
    MATMUL_UNALIGNED: "matmul_unaligned",
    MATMUL_PRECISION: "matmul_precision",
    MATMUL_OTHER: "matmul_other",
    ATTENTION_PART: "attention",
    MEMORY_BOUND: "memory_bound",
    BELOW_BANDWIDTH: "below_bandwidth",
    FP8_CASTS: "fp8_casts",
    RECOMPUTATION: "recomputation",
    OPTIMIZER_PART: "optimizer",
    EXPOSED_COMMUNICATION: "exposed_communication",
    TRANSFERS: "transfers",
    IDLE_LAUNCH: "idle_launch",
    IDLE_SYNCHRONISATION: "idle_synchronisation",
    IDLE_INPUT: "idle_input",
    IDLE_HOST: "idle_host",
    IDLE_COMPILATION: "idle_compilation",
    IDLE_ALLOCATOR: "idle_allocator",
    IDLE_OTHER: "idle_other",
}
PARTS = tuple(KEYS)
IDLE_PARTS = (
    *(IDLE_LAUNCH, IDLE_SYNCHRONISATION, IDLE_INPUT, IDLE_HOST),
    *(IDLE_COMPILATION, IDLE_ALLOCATOR, IDLE_OTHER),
)


class WaterfallPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step."""

    name: str  # one of PARTS
    key: str = ""  # by its name; rows of older runs have none
    ns: float  # of one step; a part may be below zero where the machine beats its ceiling, as `why` then says
    share: float  # of the step
    how: str  # 'measured', 'predicted' or 'specified': the limit it was split by
    why: str = ""  # one line of evidence
    by_class: dict[str, float] = {}  # nanoseconds by class of kernel, where it has several

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "key", KEYS.get(self.name, ""))


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """A step and its parts, in the order of PARTS; those of zero are left out."""

    step_ns: float
    measured_by: str  # 'the untraced step', an estimate of it with its range, or 'the trace'
    untraced: UntracedStep | None = None  # what `step_ns` is of; None: the traced step
    parts: tuple[WaterfallPart, ...]
    mfu: float | None  # of the datasheet's dense peak of the precision used; None where no FLOPs are known
    hfu: float | None  # with recomputation
    roofline_share: float | None  # what the step's work must take at the machine's ceilings, of what it took
    precision: str = ""  # MFU and HFU are shares of its peak
    peak_share: float | None = (
        None  # of the datasheet's peak: the rate that the ideal is at; None: no datasheet has one
    )
    convention: str = ""  # how FLOPs are counted: attention causal or whole
    notes: tuple[str, ...] = ()
    limit: StepLimit | None = (
        None  # None: the step's FLOPs or the GPU's peaks are not known, or an earlier version's run
    )

    def ns(self, name: str) -> float:
        """A part's time; 0 where the step has none of it."""
        return next((part.ns for part in self.parts if part.name == name), 0.0)
