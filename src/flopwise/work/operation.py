"""The words for a step's work: those of the shape simulator, the dry run and the roofline."""

import math

import msgspec

from flopwise.spec.dtypes import item_bytes

PHASES = ("forward", "loss", "backward", "optimizer", "recompute")

# The classes of kernels and of the ops above them.
MATMUL = "matmul"
ATTENTION = "attention"
SOFTMAX = "softmax"
NORMALISATION = "normalisation"
ELEMENTWISE = "elementwise"
REDUCTION = "reduction"
COPY = "copy/cast"
OPTIMIZER = "optimizer"
INDEX = "embedding/index"
LOSS = "loss"
COMMUNICATION = "communication"
MEMORY = "memory"
RANDOM = "random"
OTHER = "other"
_ARITHMETIC = (MATMUL, ATTENTION, SOFTMAX, NORMALISATION, ELEMENTWISE, REDUCTION)
CLASSES = (*_ARITHMETIC, COPY, OPTIMIZER, INDEX, LOSS, COMMUNICATION, MEMORY, RANDOM, OTHER)

PART = "sdpa: "  # how the name of an op begins that is a kernel inside the call of fused attention

# Who owns a byte.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
ACTIVATIONS = "activations"
SCORES = "attention scores"
LOGITS = "logits"
INPUTS = "inputs"
BUFFERS = "buffers"
TEMPORARY = "temporary"
WORKSPACE = "workspace"
GATHERED = "gathered weights"  # of other ranks, for as long as they are used
SAVED = (ACTIVATIONS, SCORES, LOGITS)  # what forward keeps for backward
OWNERS = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, *SAVED, INPUTS, BUFFERS, TEMPORARY, WORKSPACE, GATHERED)
UNKNOWN = "unknown"  # whose bytes a snapshot does not tell; a step of our own has none


class OpWork(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a step and what it must do, whatever it will take.

    >>> OpWork(op="mm", module="blocks.0.mlp.up", phase="forward", kind=MATMUL, dtype="bf16",
    ...        flops=2 * 4 * 8 * 16, read_bytes=2 * (4 * 8 + 8 * 16), write_bytes=2 * 4 * 16).intensity
    2.2857142857142856
    """

    op: str  # 'mm', 'softmax'; the dry run: aten's name without overload
    module: str  # 'blocks.0.attention.q'; '' outside every module
    phase: str  # one of PHASES
    kind: str  # one of CLASSES
    dtype: str  # it computes in: fp32, tf32, bf16, fp16, fp8; of a matmul, what its inputs are rounded to
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    kernels: int = 1  # launches it takes in eager PyTorch; 0: a view, nothing runs
    strided: bool = False  # an input is broadcast or not contiguous: no wide loads
    whole: bool = (
        False  # of fused attention: every query sees every key; else causal, and a kernel skips what comes later
    )
    outside: bool = False  # the dry run: no module was running, so that compiling the model does not compile it
    mixed: bool = False  # its inputs have several dtypes: each number is cast as it is loaded
    reads: tuple[tuple[int, int], ...] = ()  # (tensor, bytes), tensors numbered within the step; views are their base
    writes: tuple[tuple[int, int], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()  # of its inputs; for a matmul (M, K), (K, N) or batched

    @property
    def broadcasts(self) -> bool:
        """Whether an input is smaller than another without being a single number."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return any(1 < size < max(sizes) for size in sizes)

    @property
    def elements(self) -> int:
        """Of its largest tensor: what counts as one FLOP each where no matmul is in it. Of a lookup, those it finds."""
        if self.kind == INDEX and "backward" not in self.op:
            return self.write_bytes // item_bytes(self.dtype, 4)
        return max([self.write_bytes // item_bytes(self.dtype, 4), *map(math.prod, self.shapes)])

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        moved = self.read_bytes + self.write_bytes
        return self.flops / moved if moved else 0.0


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What lives in memory at one moment, by owner; the parts are the whole."""

    moment: str  # 'start of forward', 'peak', 'after backward'; the dry run: the op after which it was seen
    phase: str = ""
    owners: dict[str, int] = {}

    @property
    def total_bytes(self) -> int:
        """The allocated bytes: the owners' sum."""
        return sum(self.owners.values())
