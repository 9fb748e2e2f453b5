"""flopwise: why a Transformer's step is slow on a GPU, what the limit is, what to change; and the proof.

The verbs of the command line under the same names; each is imported when it is first used.

>>> import flopwise
>>> run = flopwise.bench("tiny", device="cpu")        # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

from flopwise.errors import FlopwiseError
from flopwise.version import __version__

if TYPE_CHECKING:
    from flopwise.api.account import account
    from flopwise.api.bench import bench
    from flopwise.api.compare import compare
    from flopwise.api.demo import demo
    from flopwise.api.doctor import calibrate, doctor
    from flopwise.api.explain import explain, findings
    from flopwise.api.lab import lab
    from flopwise.api.memory import memory
    from flopwise.api.profile import profile
    from flopwise.api.report import report
    from flopwise.api.roofline import roofline
    from flopwise.api.sweep import sweep
    from flopwise.api.tune import tune
    from flopwise.spec.workload import workload

_HOMES = {
    "account": "flopwise.api.account",
    "bench": "flopwise.api.bench",
    "calibrate": "flopwise.api.doctor",
    "compare": "flopwise.api.compare",
    "demo": "flopwise.api.demo",
    "doctor": "flopwise.api.doctor",
    "explain": "flopwise.api.explain",
    "findings": "flopwise.api.explain",
    "lab": "flopwise.api.lab",
    "memory": "flopwise.api.memory",
    "profile": "flopwise.api.profile",
    "report": "flopwise.api.report",
    "roofline": "flopwise.api.roofline",
    "sweep": "flopwise.api.sweep",
    "tune": "flopwise.api.tune",
    "workload": "flopwise.spec.workload",
}

__all__ = [
    "FlopwiseError",
    "__version__",
    "account",
    "bench",
    "calibrate",
    "compare",
    "demo",
    "doctor",
    "explain",
    "findings",
    "lab",
    "memory",
    "profile",
    "report",
    "roofline",
    "sweep",
    "tune",
    "workload",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flopwise' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
