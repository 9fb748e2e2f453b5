"""What a plan says of one layout: the time of a step and the memory of a GPU, by what takes them."""

import msgspec

from flopwise.spec.layout import Layout

# Where the time of a step goes, in the order in which screens show it. The first six are the computing of the busiest rank.
MATMULS, ATTENTION, PASSES = "matmuls", "attention", "other kernels"
RECOMPUTED, LOSS, UPDATE = "recomputed", "embedding and loss", "optimizer"
LAUNCHES = "launching"
TENSOR, CONTEXT, EXPERT, DATA, STAGES = "tensor ranks", "context ranks", "expert ranks", "data ranks", "pipeline ranks"
SLOWED = "slowed by exchange"  # kernels, while data moves
IMBALANCE = "uneven experts"
BUBBLE = "pipeline bubble"
COMPUTED = (MATMULS, ATTENTION, PASSES, RECOMPUTED, LOSS, UPDATE)
EXCHANGED = (TENSOR, CONTEXT, EXPERT, DATA, STAGES)
PARTS = (*COMPUTED, LAUNCHES, *EXCHANGED, SLOWED, IMBALANCE, BUBBLE)


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one step of a layout. `parts` add up to `wall_s`: what is exchanged counts as far as nothing hides it."""

    wall_s: float
    parts: dict[str, float]
    model_flops: float  # of the whole step, recomputation left out
    mfu: float  # of the GPUs' peak in half precision
    tokens_s_gpu: float
    hidden_s: dict[str, float]  # what is exchanged behind computing, by the same names
    how: str = "specified"  # the GPU's limits: by its datasheet, or 'measured' on this machine


class PlannedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the fullest GPU at its fullest moment, by who holds it."""

    peak_bytes: int
    owners: dict[str, int]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One layout of a plan: its time, its memory, and why it is not the best."""

    layout: Layout
    step: PlannedStep
    memory: PlannedMemory
    why: str = ""
