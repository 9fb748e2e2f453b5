"""Python's garbage collector, kept away for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """For a watched step, in whose middle a collection would free tensors at another moment every time; and for reading.

    Reading makes a million containers and no garbage: collecting takes as long as the reading, or twice.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
