"""Runs as earlier versions wrote them: no record has a checksum. Tests that change rows by hand begin with this."""

import re
from pathlib import Path


def unseal(run: Path) -> Path:
    """Take every seal out of a run, and its sums."""
    for file in (*run.glob("*.jsonl"), *run.glob("*.json")):
        file.write_bytes(re.sub(rb',"seal":"[^"]*"', b"", file.read_bytes()))
    (run / "sums.json").unlink(missing_ok=True)
    return run
