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
    from flopwise.spec.workload import workload
    from flopwise.verbs.account import account
    from flopwise.verbs.bench import bench
    from flopwise.verbs.calibrate import calibrate
    from flopwise.verbs.compare import compare
    from flopwise.verbs.demo import demo
    from flopwise.verbs.doctor import doctor
    from flopwise.verbs.explain import explain
    from flopwise.verbs.findings import findings
    from flopwise.verbs.lab import lab
    from flopwise.verbs.memory import memory
    from flopwise.verbs.profile import profile
    from flopwise.verbs.report import report
    from flopwise.verbs.roofline import roofline
    from flopwise.verbs.sweep import sweep
    from flopwise.verbs.tune import tune

_HOMES = {
    "account": "flopwise.verbs.account",
    "bench": "flopwise.verbs.bench",
    "calibrate": "flopwise.verbs.calibrate",
    "compare": "flopwise.verbs.compare",
    "demo": "flopwise.verbs.demo",
    "doctor": "flopwise.verbs.doctor",
    "explain": "flopwise.verbs.explain",
    "findings": "flopwise.verbs.findings",
    "lab": "flopwise.verbs.lab",
    "memory": "flopwise.verbs.memory",
    "profile": "flopwise.verbs.profile",
    "report": "flopwise.verbs.report",
    "roofline": "flopwise.verbs.roofline",
    "sweep": "flopwise.verbs.sweep",
    "tune": "flopwise.verbs.tune",
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
