"""Traces that others have published, beside the repository where somebody has fetched them; tests of them skip where not."""

import importlib.util
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FLOPWISE_PUBLIC_TRACES") or Path(__file__).parents[2] / "shared" / "fixtures" / "public")
FILES = sorted(FOLDER.glob("*.json.gz"))
needs_public = pytest.mark.skipif(not FILES, reason="the public traces are not here")


def public_trace(name: str) -> Path:
    """The file whose name begins so."""
    found = next((path for path in FILES if path.name.startswith(name)), None)
    if found is None:
        pytest.skip(f"{name} is not among the public traces in {FOLDER}")
    return found


def by_script(path: Path) -> list[tuple[float, float]]:
    """(ms, busy ms) of each step, by a script that uses nothing of flopwise."""
    script = Path(__file__).parents[1] / "benchmarks" / "public_traces.py"
    spec = importlib.util.spec_from_file_location("public_traces_script", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.steps_of(path)
