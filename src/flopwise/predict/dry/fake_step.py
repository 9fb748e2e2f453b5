"""Runs a workload's step on fake tensors and returns the tape: no GPU, no memory, no time that means anything."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from flopwise import torch_private
from flopwise.capture.build import build_step
from flopwise.capture.raised import describe_error, where
from flopwise.capture.watch.modules import ModuleNames
from flopwise.capture.watch.tape import Tape
from flopwise.capture.watch.tracker import Tracker
from flopwise.collector import no_collector
from flopwise.errors import FlopwiseError, one_line
from flopwise.predict.dry.architecture import CPU, Architecture
from flopwise.predict.dry.cuda_autocast import cuda_autocast
from flopwise.predict.dry.cuda_ops import Attention, cuda_ops
from flopwise.predict.dry.known_numbers import KnowingFakeMode
from flopwise.spec.workload import UserStep, Workload
from flopwise.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

_CPU = torch.device("cpu")


def record(workload: Workload, architecture: Architecture, attention: Attention) -> Tape:
    """Build the step, run it twice (the second is like all that follow), and return the tape."""
    with _pretending(workload, architecture, attention) as tracker:

        def build() -> dict[str, Callable[[], object]]:
            step = build_step(workload, _CPU)
            tracker.tape.linear = step.linear
            return step.phases

        run_twice(tracker, build)
    return tracker.tape


def record_build(workload: Workload, architecture: Architecture) -> Tape:
    """Build the step and run nothing."""
    with _pretending(workload, architecture, Attention(architecture)) as tracker:
        step = build_step(workload, _CPU)
        tracker.begin("after", [])
        for optimizer in step.optimizers:
            tracker.label_state(optimizer)
        del step
    return tracker.tape


@contextmanager
def _pretending(workload: Workload, architecture: Architecture, attention: Attention) -> Iterator[Tracker]:
    """While open, tensors are fake and stand for a GPU's (or are the CPU's own), and a tracker watches."""
    names = ModuleNames()
    with ExitStack() as stack:
        swaps = {}
        if architecture.name != CPU:
            stack.enter_context(cuda_autocast())
            swaps = stack.enter_context(cuda_ops(attention))
            stack.enter_context(torch_private.foreach_by_default())
        stack.enter_context(tolerant_modules())
        stack.enter_context(torch_private.scaler_always_steps())
        stack.enter_context(names.watched())
        stack.enter_context(_one_clear_line(workload))
        stack.enter_context(no_collector())
        stack.enter_context(torch_private.taken_as_real())
        fake = stack.enter_context(KnowingFakeMode())
        tracker = Tracker(names, swaps, architecture.workspace_bytes, architecture.name == "hopper")
        stack.enter_context(tracker.watching_optimizers())
        stack.enter_context(tracker)
        yield tracker
        tracker.tape.guessed = fake.guessed


def run_twice(tracker: Tracker, build: Callable[[], dict[str, Callable[[], object]]]) -> None:
    """Build the phases and run them two times under the tracker."""
    phases = build()
    for sections in (tracker.tape.first, tracker.tape.steady):
        for name, run in phases.items():
            tracker.begin(name, sections)
            run()
    tracker.begin("after", [])  # what is freed when all is dropped belongs to no step


@contextmanager
def tolerant_modules() -> Iterator[None]:
    """`module.to(...)` refuses fake parameters that something refers to; here it only replaces their data."""

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                torch_private.apply_to(child, fn)
        with torch.no_grad():
            for parameter in torch_private.parameter_slots(self).values():
                if parameter is not None:
                    parameter.data = fn(parameter)
        buffers = torch_private.buffer_slots(self)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = fn(buffer)
        return self

    with torch_private.applying_by(apply):
        yield


@contextmanager
def _one_clear_line(workload: Workload) -> Iterator[None]:
    """What fake tensors cannot do is said in one line that names the op."""
    own = isinstance(workload.subject, UserStep)
    hint = "measure it instead: `flopwise bench` runs the step for real"
    try:
        yield
    except FlopwiseError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what = "a number read from a tensor (.item(), float(), bool(), nonzero…)"
        place = where(error) or workload.target
        raise FlopwiseError(
            one_line(f"{place} cannot be dry-run: {error.func} needs the tensor's values, and a dry run has none"),
            f"leave out {what} in the step" if own else hint,
        ) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError) as error:
        name = getattr(error, "func", None) or one_line(str(error), 160)
        raise FlopwiseError(
            f"{workload.target} cannot be dry-run: {name} has no rule for fake tensors", hint
        ) from error
    except Exception as error:
        raise FlopwiseError(f"{workload.target} cannot be dry-run: {describe_error(error)}", hint) from error
