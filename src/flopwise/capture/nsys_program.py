"""The nsys program: where it is, and what this version of it can do."""

import os
import shutil
import subprocess
from pathlib import Path

_PLACES = (
    "opt/nvidia/nsight-systems*/**/bin/nsys",
    "opt/nvidia/nsight-compute/*/host/*/nsys",
    "usr/local/cuda*/bin/nsys",
)
_ANSWERS_S = 60.0  # the first start from a cold disk takes many seconds


def find_nsys() -> str:
    """The nsys program: on PATH, else the newest one where NVIDIA installs it; '' without one."""
    places = (str(p) for pattern in _PLACES for p in sorted(Path("/").glob(pattern), reverse=True))
    return shutil.which("nsys") or next((p for p in places if os.access(p, os.X_OK)), "")


def nsys_version(program: str) -> str:
    """What the program says of itself; raises OSError or SubprocessError where it does not run."""
    return _said(program, "--version")


def can_discard_environment(program: str) -> bool:
    """Whether this version can leave the environment of the process out of its report (2024 and early 2025 cannot)."""
    try:
        return "--discard-environment" in _said(program, "profile", "--help")
    except (OSError, subprocess.SubprocessError):
        return False


def _said(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_ANSWERS_S,
        check=True,
    )
    return done.stdout
