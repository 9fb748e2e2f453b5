"""Pictures of charts, drawn in a process of their own with limits of time and memory: what goes wrong there costs a picture."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flopwise.errors import FlopwiseError
from flopwise.render.vega import HINT

CPU_S, WALL_S, DATA_BYTES = 30, 120.0, 2**31  # of one chart; a usual one takes 0.1 s and 0.3 GB
MOST_BYTES = 32 * 2**20  # of its definition
MOST_FAILED = 3  # then it is the machine, or all of them are such: nothing more is tried
_PROGRAM = str(Path(__file__).with_name("draw_pictures.py"))


class NotDrawn(FlopwiseError):
    """A chart whose picture there is not."""

    def __init__(self) -> None:
        super().__init__(
            "the chart could not be drawn", "its numbers are in --format json; -o FILE.html draws it in a browser"
        )


class Drawing:
    """One process for all pictures of a page; it loads while the first chart is being defined.

    with Drawing() as drawing:
        svg = drawing.picture(spec, ".svg")
    """

    def __init__(self) -> None:
        try:
            import vl_convert  # noqa: F401
        except ImportError:
            raise FlopwiseError("charts need the packages altair and vl-convert-python", HINT) from None
        self._failed = 0
        self._process: subprocess.Popen[bytes] | None = _started()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def picture(self, spec: Mapping[str, Any], suffix: str) -> bytes:
        """The file's content; raises NotDrawn, and the next chart gets a new process."""
        text = json.dumps({"suffix": suffix, "spec": spec, "cpu_s": CPU_S, "data_bytes": DATA_BYTES}).encode()
        if self._failed >= MOST_FAILED or len(text) > MOST_BYTES:
            raise NotDrawn
        self._process = self._process or _started()
        drawn = _answer(self._process, text)
        if drawn is None:
            self._failed += 1
            self._end()
        if not drawn:
            raise NotDrawn
        return drawn

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _started() -> subprocess.Popen[bytes]:
    """By its file, as a module would import the package; `-P`: nothing beside it has the name of a library."""
    words = (sys.executable, "-P", _PROGRAM)
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _answer(process: "subprocess.Popen[bytes]", text: bytes) -> bytes | None:
    """What it drew, b'' where it cannot draw that; None where it ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    clock = threading.Timer(WALL_S, process.kill)
    clock.daemon = True
    clock.start()
    try:
        process.stdin.write(text + b"\n")
        process.stdin.flush()
        size = process.stdout.readline()
        content = process.stdout.read(int(size)) if size else b""
    except OSError:
        return None
    finally:
        clock.cancel()
    return content if size and len(content) == int(size) else None
