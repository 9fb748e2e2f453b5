"""flopwise: why a Transformer's step is slow on a GPU, what the limit is, what to change; and the proof.

The verbs of the command line under the same names; each is imported when it is first used.

>>> import flopwise
>>> run = flopwise.bench("tiny", device="cpu")        # doctest: +SKIP
>>> print(run)                                         # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

from flopwise.errors import FlopwiseError
from flopwise.records.printed import print_by
from flopwise.version import __version__

if TYPE_CHECKING:
    from flopwise.api.account import account
    from flopwise.api.apply import apply
    from flopwise.api.bench import bench
    from flopwise.api.compare import compare
    from flopwise.api.course import course
    from flopwise.api.demo import demo
    from flopwise.api.doctor import calibrate, doctor
    from flopwise.api.explain import explain, findings
    from flopwise.api.generate import generate
    from flopwise.api.lab import lab
    from flopwise.api.memory import memory
    from flopwise.api.plan import plan
    from flopwise.api.profile import profile
    from flopwise.api.report import report
    from flopwise.api.roofline import roofline
    from flopwise.api.run import run
    from flopwise.api.sweep import sweep
    from flopwise.api.train import train
    from flopwise.api.tune import tune
    from flopwise.api.watch import watch
    from flopwise.spec.workload import workload

__all__ = [
    "FlopwiseError",
    "__version__",
    "account",
    "apply",
    "bench",
    "calibrate",
    "compare",
    "course",
    "demo",
    "doctor",
    "explain",
    "findings",
    "generate",
    "lab",
    "memory",
    "plan",
    "profile",
    "report",
    "roofline",
    "run",
    "sweep",
    "train",
    "tune",
    "watch",
    "workload",
]
# A verb's module has its name, so that `import flopwise` costs nothing; these are elsewhere.
_ELSEWHERE = {
    "calibrate": "flopwise.api.doctor",
    "findings": "flopwise.api.explain",
    "workload": "flopwise.spec.workload",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'flopwise' has no attribute '{name}'")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, f"flopwise.api.{name}")), name)


def _text(result: object) -> str:
    from flopwise.render.views import text_of  # rich and polars, which `import flopwise` does without

    return text_of(result)


def _html(result: object) -> str:
    from flopwise.render.views import html_of

    return html_of(result)


print_by(_text, _html)


def __dir__() -> list[str]:
    return sorted(__all__)
