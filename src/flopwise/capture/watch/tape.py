"""What a step did, as data: storages that come and go, and the ops between, in the order it happened. No torch here."""

from dataclasses import dataclass, field

from flopwise.work.operation import OpWork

ALLOC, FREE, OP = 0, 1, 2
Event = tuple[int, int]  # (ALLOC or FREE, the storage's number) or (OP, the op's number)

BUILD = "build"  # the section before the first step
HOST = "host"  # the label of a tensor that stays on the CPU when the rest is on a GPU


@dataclass(slots=True)
class Storage:
    """One piece of memory, from its allocation on."""

    nbytes: int  # as asked for, before any rounding
    shape: tuple[int, ...]  # of the tensor it was made for
    dtype: str
    op: int  # the op that made it
    label: str = ""  # an owner known for certain: a parameter, a gradient, workspace…
    module: str = ""  # whose parameter it is, or is of; '' if that is not known


@dataclass(slots=True)
class Section:
    """The events of one phase of one step."""

    name: str
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ManyTensors:
    """One position in the lists of an op that walks many tensors: what is there, summed over the lists."""

    elements: int
    module: str
    read_bytes: int
    write_bytes: int


@dataclass(slots=True)
class Op:
    """An op's work; of an op over many tensors also each position of its lists."""

    work: OpWork
    tensors: tuple[ManyTensors, ...] = ()
    lists: int = 0  # that its kernel walks


@dataclass(slots=True)
class Tape:
    """Building the step, its first run, and one run as they all are from then on."""

    storages: list[Storage] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    build: Section = field(default_factory=lambda: Section(BUILD))
    first: list[Section] = field(default_factory=list)
    steady: list[Section] = field(default_factory=list)
    guessed: int = 0  # numbers that code read from tensors without values
    linear: str = ""  # as `Step` has it

    def sections(self) -> list[Section]:
        """All sections in the order they ran."""
        return [self.build, *self.first, *self.steady]
