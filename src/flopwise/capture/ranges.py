"""Names that a profiler sees: phases, and the modules of a model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

PHASE, MODULE = "flopwise.", "flopwise.module:"  # the trace readers know these prefixes


def named(phase: str) -> AbstractContextManager[object]:
    """The range around a phase; free when no profiler is looking."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"{PHASE}{phase}")
    return nullcontext()


@contextmanager
def named_modules(model: nn.Module | None) -> Iterator[None]:
    """While open, every module's forward is a range with the module's own name (`blocks.0.attention.q`)."""
    open_ranges: list[torch.profiler.record_function] = []
    handles = []

    def enter(name: str) -> object:
        def hook(*_: object) -> None:
            entered = torch.profiler.record_function(f"{MODULE}{name}")
            entered.__enter__()
            open_ranges.append(entered)

        return hook

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules() if model is not None else ():
        if name:
            handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
