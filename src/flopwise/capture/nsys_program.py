"""The nsys program: where it is, and what this version of it can do."""

import os
import shutil
from pathlib import Path
from subprocess import DEVNULL, PIPE, SubprocessError, check_output

_PLACES = (
    "opt/nvidia/nsight-systems*/**/bin/nsys",
    "opt/nvidia/nsight-compute/*/host/*/nsys",
    "usr/local/cuda*/bin/nsys",
)
_ANSWER_S = 60.0  # the first start from a cold disk takes many seconds


def find_nsys() -> str:
    """The nsys program: on PATH, else the newest one where NVIDIA installs it; '' without one."""
    places = (str(p) for pattern in _PLACES for p in sorted(Path("/").glob(pattern), reverse=True))
    return shutil.which("nsys") or next((p for p in places if os.access(p, os.X_OK)), "")


def nsys_version(program: str) -> str:
    """The program's version line; raises OSError or SubprocessError where it does not run."""
    return _output(program, "--version")


def can_discard_environment(program: str) -> bool:
    """Whether this version can omit the process's environment from its report (2024 and early 2025 cannot)."""
    try:
        return "--discard-environment" in _output(program, "profile", "--help")
    except (OSError, SubprocessError):
        return False


def _output(*command: str) -> str:
    return check_output(command, stdin=DEVNULL, stderr=PIPE, text=True, errors="replace", timeout=_ANSWER_S)
