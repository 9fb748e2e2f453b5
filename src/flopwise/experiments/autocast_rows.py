"""What an audit of autocast writes down: rows, and the words in them. No torch here."""

from flopwise.experiments.rows import Row

OWN_RULES, CUDA_RULES = "rules of this device", "CUDA's rules, applied on the CPU"
# What autocast does to an operation: casts its inputs down, keeps it in fp32, or leaves it alone; and what code casts itself.
LOWERED, KEPT, FOLLOWS, OWN = "lowered", "kept in fp32", "follows its inputs", "cast by its own code"
UNKNOWN = "not found out"
MIX = "fp32 and half"  # the dtypes of inputs that differ


class Audited(Row, frozen=True, kw_only=True):
    model: str
    rules: str
    precision: str


class Whole(Audited, frozen=True, kw_only=True, tag_field="part", tag="whole"):
    """Parameters, gradients or the loss: how many tensors have this dtype."""

    what: str
    dtype: str
    tensors: int
    held_bytes: int


class Operation(Audited, frozen=True, kw_only=True):
    op: str
    given: str  # the dtype of its inputs
    dtype: str  # of its result
    treatment: str


class Module(Operation, frozen=True, kw_only=True, tag_field="part", tag="module"):
    """A module's output, and the operation that made it."""

    module: str
    kind: str
    gradient_dtype: str


class Call(Operation, frozen=True, kw_only=True, tag_field="part", tag="call"):
    """A kind of call, and how often it was made."""

    count: int


class Refused(Audited, frozen=True, kw_only=True, tag_field="part", tag="refused"):
    why: str
