"""Reads any trace file, by its suffix: PyTorch's (Kineto) JSON or an Nsight Systems export."""

from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.trace.kineto import read_kineto
from flopwise.trace.nsys import read_nsys
from flopwise.trace.tables import Trace

_KINETO = (".json", ".json.gz")
_NSYS = (".sqlite", ".sqlite.gz", ".nsys-rep")


def is_trace_file(path: Path) -> bool:
    """Whether the file's name has the suffix of a trace.

    >>> is_trace_file(Path("step.json.gz")), is_trace_file(Path("last"))
    (True, False)
    """
    return path.name.lower().endswith(_KINETO + _NSYS)


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the suffix decides which kind."""
    path = Path(path)
    name = path.name.lower()
    if name.endswith(_KINETO):
        return read_kineto(path)
    if name.endswith(_NSYS):
        return read_nsys(path)
    raise unknown_suffix(path)


def unknown_suffix(path: Path) -> FlopwiseError:
    """The error for a file whose suffix is not one of a trace.

    >>> unknown_suffix(Path("k.txt")).message
    "k.txt is not a trace: its suffix is '.txt'"
    """
    problem = f"its suffix is '{path.suffix}'" if path.suffix else "it has no suffix"
    return FlopwiseError(f"{path} is not a trace: {problem}", f"traces end in {', '.join(_KINETO + _NSYS)}")
