"""A few lines of C for the host, where Python is too slow to see what the machine does: compiled at run time."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flopwise.errors import Unsupported, one_line

COMPILERS = ("cc", "gcc", "clang")


def compile_host(source: str, what: str, flags: Sequence[str] = ("-O2",)) -> ctypes.CDLL:
    """The functions of a C source; `what` needs them. `Unsupported` where there is no compiler, or it fails."""
    named = os.environ.get("CC", "").split()
    found = named[:1] if named else [path for name in COMPILERS if (path := shutil.which(name))]
    if not found:
        raise Unsupported(f"{what} needs a C compiler on a CPU, and none is found", "install gcc or clang")
    with tempfile.TemporaryDirectory() as folder:
        written, library = Path(folder) / "host.c", Path(folder) / "host.so"
        written.write_text(source, encoding="utf-8")
        command = [found[0], *named[1:], *flags, "-shared", "-fPIC", "-o", str(library), str(written)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode == 0:
                return ctypes.CDLL(str(library))  # stays loaded after its file is gone
        except OSError as error:
            raise Unsupported(one_line(f"{what} needs a C compiler on a CPU: {error}")) from error
    raise Unsupported(one_line(f"{what} needs a C compiler on a CPU, and {found[0]} fails: {ended.stderr}"))
