"""What this machine can do, and what to do about what it cannot."""

import os

from flopwise.capture.doctor import Check, examine
from flopwise.capture.doctor import busy as busy_with


def busy() -> str:
    """A warning where other work on this machine would be in what is measured now; else empty."""
    return busy_with(os.cpu_count() or 1)


def doctor() -> list[Check]:
    """Look at Python, torch, Triton, the GPUs, nsys and what else runs here.

    >>> [check.name for check in flopwise.doctor()]        # doctest: +SKIP
    ['python', 'torch', 'triton', 'device', 'nsys', 'switches', 'cpu']
    """
    return examine()
