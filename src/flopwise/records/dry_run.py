"""What a dry run tells. No torch here: whoever asks for one need not have it."""

import msgspec

from flopwise.records.run import PhaseMemory
from flopwise.work.operation import Footprint, OpWork

TOLD = 2000  # tensors at the peak: enough for every kind of a deep model's layers


class LiveTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that was there at the peak or after forward, and where it came from."""

    bytes: int
    owner: str
    op: str  # that made it; '' before the first step
    module: str
    phase: str  # '' before the first step
    shape: tuple[int, ...]
    dtype: str


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """One step on fake tensors, as it would go on a GPU once it runs steadily.

    Bytes are the allocator's: of every block, with its rounding. The parts of `live` sum to what is allocated, always.
    """

    workload: str  # its label
    architecture: str
    torch: str  # the version whose ops these are
    ops: tuple[OpWork, ...]
    live: dict[
        str, tuple[int, ...]
    ]  # owner -> bytes while each op ran, its results included; owners without any left out
    peak: Footprint
    peak_op: int  # the op during which it was reached
    moments: tuple[Footprint, ...]  # start of forward, end of forward, after backward, after optimizer: those there are
    memory: tuple[PhaseMemory, ...]  # phase by phase, as a measurement tells it
    largest: tuple[LiveTensor, ...]  # at the peak, largest first
    parameters: int  # numbers; a shared one once
    saved: tuple[LiveTensor, ...] = ()  # what forward and loss have made and backward finds, largest first
    parameters_bytes: int  # as asked for, without rounding
    gradients_bytes: int
    optimizer_bytes: int
    attention: tuple[str, ...] = ()  # SDPA's backends that were used
    compiled: bool = False  # the workload is compiled; these are the eager ops, which the compiler would fuse
    notes: tuple[str, ...] = ()  # where the step that was run is not quite the one asked for

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at any moment."""
        return self.peak.total_bytes
