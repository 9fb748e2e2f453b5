"""The lab: claims about GPUs, each measured on the machine at hand, with a verdict that may be 'refuted here'.

An experiment is one file in `experiments/`; it is found by being there. `experiment.py` says what it is made of, `bench.py`
what it measures with. `flopwise lab all --quick` must end within two minutes on two CPU cores, so an experiment has about
five seconds in quick mode.

The verb has the room's name: `flopwise.lab("warmup")` is a call, whether or not a module of this room has been imported
before (which puts the room itself into that place). So the room can be called.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("flopwise.verbs.lab").lab(*arguments, **options)


sys.modules[__name__].__class__ = _Room
