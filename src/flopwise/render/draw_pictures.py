"""The process that draws: definitions of charts on standard input, pictures on standard output. It imports nothing of flopwise.

A line of JSON asks, `{"suffix": ".svg", "spec": {…}, "cpu_s": 30, "data_bytes": …}`; a line with a number answers, and that
many bytes follow. It ends with its input.
"""

import json
import os
import sys
from contextlib import suppress
from typing import Any

import vl_convert

_PNG_SCALE = 2.0
_FIRST = {"mark": "point", "data": {"values": [{"a": 1}]}, "encoding": {"x": {"field": "a", "type": "quantitative"}}}


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    vl_convert.vegalite_to_svg(_FIRST)  # Vega itself takes a second to load: while the first chart is being defined
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        _limit(asked["cpu_s"], asked["data_bytes"])
        picture = _drawn(asked["spec"], asked["suffix"])
        answers.write(b"%d\n" % len(picture) + picture)
        answers.flush()


def _drawn(spec: dict[str, Any], suffix: str) -> bytes:
    try:
        if suffix == ".png":
            return bytes(vl_convert.vegalite_to_png(spec, scale=_PNG_SCALE))
        return str(vl_convert.vegalite_to_svg(spec)).encode()
    except (ValueError, TypeError, RuntimeError):
        return b""


def _limit(cpu_s: int, data_bytes: int) -> None:
    """For the next chart. Vega's engine reserves 64 GiB of addresses, so what counts is what it may write to."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main()
