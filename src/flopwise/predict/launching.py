"""What launching a step costs the CPU, operation by operation and phase by phase."""

from collections.abc import Container, Iterable, Sequence

from flopwise.records.ceilings import Ceilings, HostCost, HostCounts
from flopwise.work.operation import COPY, OPTIMIZER, PART, OpWork


def host_ns(op: OpWork, cost: HostCost) -> float:
    """What the CPU spends on an operation.

    >>> cost = HostCost(op_ns=9.0, view_ns=1.0, kernel_ns=4.0, cast_ns=6.0)
    >>> cast = OpWork(op="to", module="", phase="forward", kind=COPY, dtype="bf16", read_bytes=4, write_bytes=2)
    >>> host_ns(cast, cost)
    6.0
    """
    if not op.kernels:
        return cost.view_ns
    if op.op.startswith(PART):
        return op.kernels * cost.kernel_ns
    listed = len(op.reads) if op.kind == OPTIMIZER else 0
    first_ns = cost.op_ns if cost.cast_ns is None or not is_cast(op) else cost.cast_ns
    return first_ns + (op.kernels - 1) * cost.kernel_ns + listed * cost.listed_ns


def host_counts(ops: Iterable[OpWork]) -> HostCounts:
    """What of some operations the host has to launch, counted as `host_ns` charges for it."""
    some = list(ops)
    own = [op for op in some if op.kernels and not op.op.startswith(PART)]
    return HostCounts(
        ops=len(own),
        views=sum(not op.kernels for op in some),
        kernels=sum(op.kernels for op in some) - len(own),
        listed=sum(len(op.reads) for op in own if op.kind == OPTIMIZER),
        casts=sum(is_cast(op) for op in own),
    )


def is_cast(op: OpWork) -> bool:
    """Whether an operation only changes the dtype: `to`; aten's name is `_to_copy`."""
    return op.kind == COPY and op.op in ("to", "_to_copy") and op.read_bytes != op.write_bytes


class Host:
    """What launching costs, phase by phase: the CPU's part of a step, which is what the ceilings say of such phases."""

    def __init__(self, ops: Sequence[OpWork], ceilings: Ceilings, compiled: Container[str]) -> None:
        self.ceilings, self.compiled = ceilings, compiled
        phases = {op.phase for op in ops}
        self.inference = phases == {"forward"}  # then nothing is recorded for a backward pass
        self.checkpointed = "recompute" in phases  # then Python is asked about every tensor that is kept
        self.handed = _handed(ops)

    def cost(self, phase: str) -> HostCost:
        if phase in self.compiled and self.ceilings.compiled:
            return self.ceilings.compiled.get(phase) or self.ceilings.compiled["forward"]
        if phase == "forward" and self.inference:
            return self.ceilings.host_cost("inference")
        if phase in ("forward", "recompute") and self.checkpointed:
            return self.ceilings.host_cost("checkpointed")
        return self.ceilings.host_cost(phase)

    def start_ns(self, phase: str) -> float:
        """What the host does once, before the first operation of a phase."""
        cost, started = self.cost(phase), self.ceilings.backward_start_ns * (phase == "backward")
        if phase not in self.compiled:
            return cost.start_ns * (phase in ("forward", "backward", "optimizer")) + started
        if not self.ceilings.compiled:
            return self.ceilings.compiled_call_ns + started
        return cost.start_ns + started + cost.listed_ns * self.handed.get(phase, 0)


def _handed(ops: Sequence[OpWork]) -> dict[str, int]:
    """By phase, how many tensors it is handed: those that it reads and has not written itself."""
    handed: dict[str, set[int]] = {}
    made: dict[str, set[int]] = {}
    for op in ops:
        own = made.setdefault(op.phase, set())
        handed.setdefault(op.phase, set()).update(tensor for tensor, _ in op.reads if tensor not in own)
        own.update(tensor for tensor, _ in op.writes)
    return {phase: len(tensors) for phase, tensors in handed.items()}


def counts_by_phase(ops: Iterable[OpWork]) -> dict[str, HostCounts]:
    """What each phase of a step launches, the loss counted with forward."""
    known = list(ops)
    phases = {"forward": ("forward", "loss"), "backward": ("backward",), "optimizer": ("optimizer",)}
    return {name: host_counts(op for op in known if op.phase in some) for name, some in phases.items()}
