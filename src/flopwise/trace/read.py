"""Reads any trace file, by its suffix: PyTorch's (Kineto) or rocprofv3's JSON, or an Nsight Systems export."""

from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.trace.kineto import read_kineto
from flopwise.trace.nsys import read_nsys
from flopwise.trace.rocprof import is_rocprof, read_rocprof
from flopwise.trace.tables import Trace

_KINETO = (".json", ".json.gz")
_NSYS = (".sqlite", ".sqlite.gz", ".nsys-rep")
_OTHERS = {  # suffixes of what others write, and how flopwise gets the same
    ".pftrace": "of rocprofv3? record it with --output-format json, which flopwise reads",
    ".db": "of rocprofv3? record it with --output-format json, which flopwise reads",
    ".qdrep": "of an old Nsight Systems? nsys export --type sqlite makes a file that flopwise reads",
    ".pb": "of JAX or TensorFlow? flopwise reads what nsys profile records of such a program",
}


def is_trace_file(path: Path) -> bool:
    """Whether the file's name has the suffix of a trace.

    >>> is_trace_file(Path("step.json.gz")), is_trace_file(Path("last"))
    (True, False)
    """
    return path.name.lower().endswith(_KINETO + _NSYS)


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the suffix decides which kind, of JSON how it begins."""
    path = Path(path)
    name = path.name.lower()
    if name.endswith(_KINETO):
        return read_rocprof(path) if is_rocprof(path) else read_kineto(path)
    if name.endswith(_NSYS):
        return read_nsys(path)
    raise unknown_suffix(path)


def unknown_suffix(path: Path) -> FlopwiseError:
    """The error for a file whose suffix is not one of a trace.

    >>> unknown_suffix(Path("k.txt")).message
    "k.txt is not a trace: its suffix is '.txt'"
    """
    problem = f"its suffix is '{path.suffix}'" if path.suffix else "it has no suffix"
    hint = _OTHERS.get(path.suffix.lower(), f"traces end in {', '.join(_KINETO + _NSYS)}")
    return FlopwiseError(f"{path} is not a trace: {problem}", hint)
