"""flopwise: why a Transformer's step is slow on a GPU, what the limit is, what to change; and the proof.

The verbs of the command line under the same names; each is imported when it is first used.

>>> import flopwise
>>> run = flopwise.bench("tiny", device="cpu")        # doctest: +SKIP
"""

import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from flopwise.errors import FlopwiseError
from flopwise.version import __version__

if TYPE_CHECKING:
    from flopwise.api.account import account
    from flopwise.api.apply import apply
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
    from flopwise.api.run import run
    from flopwise.api.sweep import sweep
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
    "demo",
    "doctor",
    "explain",
    "findings",
    "lab",
    "memory",
    "profile",
    "report",
    "roofline",
    "run",
    "sweep",
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
    if "IPython" in sys.modules:
        _show_results_as_tables()
    return getattr(importlib.import_module(_ELSEWHERE.get(name, f"flopwise.api.{name}")), name)


@cache
def _show_results_as_tables() -> None:
    """In a notebook, a result as the last line of a cell shows its tables."""
    shell = sys.modules["IPython"].get_ipython()
    if shell is not None:
        from flopwise.render.views import show_in_notebooks  # polars, which `import flopwise` does without

        show_in_notebooks(shell.display_formatter.formatters["text/html"])


def __dir__() -> list[str]:
    return sorted(__all__)
