"""Python's garbage collector, kept out of a watched step: it frees tensors at moments of its own."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """A collection in the middle of a step would free what the step holds at another moment every time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
