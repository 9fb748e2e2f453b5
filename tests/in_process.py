"""The command line without a process of its own: a second less for every test."""

import io
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from flopwise.cli.main import main


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def in_process(*words: object, cwd: Path | None = None, **environment: str) -> Ended:
    """`flopwise WORDS` in this process, in the folder `cwd` and with these environment variables."""
    printed, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(said):
        for name in ("FLOPWISE_RUNS", "FLOPWISE_DEBUG"):
            patch.delenv(name, raising=False)
        for name, value in ({"COLUMNS": "200"} | environment).items():
            patch.setenv(name, value)
        patch.chdir(cwd or Path.cwd())
        try:
            with pytest.raises(SystemExit) as ended:
                main([str(word) for word in words])
        finally:
            for sign, handler in before.items():
                signal.signal(sign, handler)
    out, err = (stream.buffer.getvalue().decode() for stream in (printed, said))  # type: ignore[attr-defined]
    return Ended(int(ended.value.code or 0), out, err)
