"""What this machine can do, and what to do about what it cannot."""

from flopwise.capture.doctor import Check, examine


def doctor() -> list[Check]:
    """Look at Python, torch, Triton, the GPUs, nsys and what else runs here.

    >>> [check.name for check in flopwise.doctor()]        # doctest: +SKIP
    ['python', 'torch', 'triton', 'device', 'nsys', 'switches', 'cpu']
    """
    return examine()
