"""A look at a loop of accelerate: `with accelerator.profile(FlopwiseKwargs()): …`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.utils import ProfileKwargs

from flopwise.api.watch import Watch


@dataclass
class FlopwiseKwargs(ProfileKwargs):  # type: ignore[misc]
    """In the place of PyTorch's profiler: the block's steps are timed, some traced, and at its end the screen is printed.

    Steps are found by the optimizer's updates; the profiler's `step()` need not be called, and does nothing.
    """

    steps: int | None = None
    traced: int = 2

    def build(self) -> Any:
        return _watched(Watch(steps=self.steps, traced=self.traced, name="accelerate loop"))


@contextmanager
def _watched(watch: Watch) -> Iterator["_Profiler"]:
    watch.open()
    try:
        yield _Profiler(watch)
    except BaseException:
        watch.close()
        raise
    watch.show()


class _Profiler:
    """What the block is given; it has what a loop may call of PyTorch's profiler."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def step(self) -> None:
        """The end of a step is known from the optimizer."""
