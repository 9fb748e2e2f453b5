"""Ranges that a profiler records: phases, and the modules of a model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from flopwise.records.run import STEP
from flopwise.torch_private import compiled_call, profiler_is_on, set_compiled_call

PHASE, MODULE, NUMBERED_STEP = "flopwise.", "flopwise.module:", "flopwise.step:"  # the trace readers know these


def named(phase: str) -> AbstractContextManager[object]:
    """The range around a phase; free when no profiler is on. A step without phases has no range for one."""
    if phase != STEP and profiler_is_on():
        return torch.profiler.record_function(f"{PHASE}{phase}")
    return nullcontext()


def run_phases(phases: Mapping[str, Callable[[], object]]) -> None:
    """One step, each phase inside its range."""
    for phase, run in phases.items():
        with named(phase):
            run()


@contextmanager
def named_modules(model: nn.Module | None) -> Iterator[None]:
    """While open, every module's forward is a range with the module's own name (`blocks.0.attention.q`).

    A compiled module is one range: its inside is compiled away, and a hook there would compile it again.
    """
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

    def named_call(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            with torch.profiler.record_function(f"{MODULE}{name}"):
                return call(*args, **kwargs)

        return run

    modules = dict(model.named_modules()) if model is not None else {}
    compiled = {name: call for name, module in modules.items() if (call := compiled_call(module)) is not None}
    for name, call in compiled.items():
        set_compiled_call(modules[name], named_call(name, call))
    for name, module in modules.items():
        if name and not any(name == outer or name.startswith(f"{outer}.") for outer in compiled):
            # Always called: checkpointing ends a recomputation by an exception inside the module that needs no more of it.
            left = module.register_forward_hook(leave, always_call=True)
            handles += [module.register_forward_pre_hook(enter(name)), left]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, call in compiled.items():
            set_compiled_call(modules[name], call)
