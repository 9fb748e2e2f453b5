"""The user's own step: `py:module:factory`.

`factory(device)` is called once, in a process of its own, and returns either a callable (the whole step) or a mapping of
phase names to callables, run in that order. flopwise times, synchronises and repeats; the step only does the work.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping

import torch

from flopwise.capture.step import Step
from flopwise.errors import FlopwiseError, one_line
from flopwise.lm.precision import fp32_matmul_probe
from flopwise.records import STEP, Ran
from flopwise.spec.workload import UserStep

_HINT = "the factory takes the device and returns a callable, or {'forward': …, 'backward': …}; see docs/reference/own-step.md"


def user_step(subject: UserStep, device: torch.device) -> Step:
    """Import the factory from the working directory or the path, call it, and check what it returns."""
    phases = _phases(_factory(subject.reference)(device), subject.reference)
    return Step(phases=phases, ran=lambda: Ran(device=str(device), fp32_matmul=fp32_matmul_probe(device)))


def _factory(reference: str) -> Callable[[torch.device], object]:
    module_name, _, path = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise FlopwiseError(
                f"there is no module '{module_name}'", "run flopwise where it can be imported, or set PYTHONPATH"
            ) from None
        raise
    for name in path.split("."):
        if not hasattr(found, name):
            raise FlopwiseError(f"module '{module_name}' has no '{path}'", _HINT)
        found = getattr(found, name)
    if not callable(found):
        raise FlopwiseError(f"py:{reference} is not callable", _HINT)
    return found


def _phases(made: object, reference: str) -> dict[str, Callable[[], object]]:
    if callable(made):
        return {STEP: made}
    if not isinstance(made, Mapping) or not made:
        raise FlopwiseError(f"py:{reference} returned {one_line(repr(type(made)))}", _HINT)
    for name, phase in made.items():
        if not isinstance(name, str) or not name.isidentifier() or not callable(phase):
            raise FlopwiseError(
                f"py:{reference} returned a phase {one_line(repr(name), 60)} that is not a name with a callable", _HINT
            )
        if name == STEP and len(made) > 1:
            raise FlopwiseError(
                f"py:{reference} names a phase '{STEP}' among others", f"'{STEP}' means the whole; choose another name"
            )
    return dict(made)
