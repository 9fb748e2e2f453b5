"""Memory snapshots -> timeline, owners, stacks. No torch here.

The verb has the room's name: `flopwise.memory("snapshot.pickle")` is a call, whether or not a module of this room has been
imported before (which puts the room itself into that place). So the room can be called.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("flopwise.verbs.memory").memory(*arguments, **options)


sys.modules[__name__].__class__ = _Room
