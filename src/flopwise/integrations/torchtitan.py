"""What torchtitan's own profiler wrote, explained after each export.

from flopwise.integrations.torchtitan import trace_post_processor
config.profiler.trace_post_processor = trace_post_processor()
"""

import os

from torchtitan.config.function import Function

from flopwise.api.explain import explain_one
from flopwise.errors import FlopwiseError


def trace_post_processor() -> Function.Config:
    """For `Profiler.Config.trace_post_processor`: the first rank prints the screen of each trace."""
    return Function.Config(fn=explain_trace)


def explain_trace(path: str) -> None:
    """Print why the steps of an exported trace are slow; never an error in a training job."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(explain_one(path))  # noqa: T201
    except FlopwiseError as error:
        print(f"flopwise: {error.message}")  # noqa: T201
