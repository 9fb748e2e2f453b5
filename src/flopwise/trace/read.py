"""Any trace file, by what it is: PyTorch's (Kineto) JSON or an Nsight Systems export."""

from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.trace.kineto import read_kineto
from flopwise.trace.nsys import read_nsys
from flopwise.trace.tables import Trace

_KINETO = (".json", ".json.gz")
_NSYS = (".sqlite", ".sqlite.gz", ".nsys-rep")


def is_trace_file(path: Path) -> bool:
    """Whether the name says that it is a trace.

    >>> is_trace_file(Path("step.json.gz")), is_trace_file(Path("last"))
    (True, False)
    """
    return path.name.lower().endswith(_KINETO + _NSYS)


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the suffix says which kind."""
    path = Path(path)
    name = path.name.lower()
    if name.endswith(_KINETO):
        return read_kineto(path)
    if name.endswith(_NSYS):
        return read_nsys(path)
    raise unknown_suffix(path)


def unknown_suffix(path: Path) -> FlopwiseError:
    """What to say of a file whose name does not tell that it is a trace.

    >>> unknown_suffix(Path("k.txt")).message
    "k.txt has the suffix '.txt', which is not a trace's"
    """
    has = f"has the suffix '{path.suffix}', which is not a trace's" if path.suffix else "has no suffix of a trace"
    return FlopwiseError(f"{path} {has}", f"rename it, if it is one: traces end in {', '.join(_KINETO + _NSYS)}")
