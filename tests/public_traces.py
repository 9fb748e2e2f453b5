"""Traces that others have published, beside the repository where somebody has fetched them; tests of them skip where not."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FLOPWISE_PUBLIC_TRACES") or Path(__file__).parents[2] / "shared" / "fixtures" / "public")
FILES = sorted(FOLDER.glob("*.json.gz"))


def public_trace(name: str) -> Path:
    """The file whose name begins so."""
    found = next((path for path in FILES if path.name.startswith(name)), None)
    if found is None:
        pytest.skip(f"{name} is not among the public traces in {FOLDER}")
    return found
