"""How far a step is from the power-capped roofline, and what takes the rest of its time."""

import msgspec

# What takes time beyond its limit, in the order of a step: keys and names.
MATMUL, ATTENTION, MEMORY, CASTS = "matmul", "attention", "memory_bound", "fp8_casts"
OPTIMIZER, RECOMPUTATION, COMMUNICATION, TRANSFERS, LAUNCH, IDLE = (
    *("optimizer", "recomputation", "communication", "transfers"),
    *("idle_launch", "idle_other"),
)
NAMES = {
    MATMUL: "matmul",
    ATTENTION: "attention",
    MEMORY: "memory-bound ops",
    CASTS: "fp8 casts and scales",
    OPTIMIZER: "optimizer",
    RECOMPUTATION: "recomputation",
    COMMUNICATION: "exposed communication",
    TRANSFERS: "host-device copies",
    LAUNCH: "idle: late launches",
    IDLE: "idle: other",
}


class LimitCause(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work: what it took, and what it must take."""

    key: str  # one of NAMES
    ns: float  # of one step
    least_ns: float = 0.0  # by its FLOPs at the capped peak, or its bytes at full bandwidth; 0: a step need not have it

    @property
    def name(self) -> str:
        return NAMES.get(self.key, self.key)

    @property
    def beyond_ns(self) -> float:
        """What remains to be won; below zero where it beats its limit."""
        return self.ns - self.least_ns


class StepLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A step between its limit and its time. `causes` add up to the step, what they must take to `limit_ns`."""

    step_ns: float
    limit_ns: float  # FLOPs at the peak of the clock that the power cap leaves, and bytes at full bandwidth
    peak_ns: float  # of it, FLOPs at the datasheet's peaks
    capped_ns: float  # of it, what those FLOPs take longer at the clock that was held
    clock_mhz: float | None = None  # that the power cap held; None: it held none, or it is not known
    peak_mhz: float | None = None  # that the datasheet's peaks are at
    causes: tuple[LimitCause, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes_ns(self) -> float:
        """Of the limit, what is bound by bytes."""
        return self.limit_ns - self.peak_ns - self.capped_ns

    @property
    def remaining_ns(self) -> float:
        return self.step_ns - self.limit_ns

    def ranked(self) -> list[LimitCause]:
        """What takes most beyond its limit first."""
        return sorted((one for one in self.causes if one.beyond_ns), key=lambda one: -one.beyond_ns)
