"""A stored run read back as what it is a run of."""

from pathlib import Path

from flopwise.experiments.results import LabRun, read_lab
from flopwise.records.training import Training
from flopwise.records.tuning import Tuning
from flopwise.store import StoredRun, find, runs_root
from flopwise.store.training import read_training
from flopwise.store.tuning import read_tuning


def stored_result(run: str | Path, runs: str | Path | None = None) -> StoredRun | Tuning | Training | LabRun:
    """The run, or the tuning, the training or the experiments that it holds; `run` is `last`, an id, a tag or a path."""
    stored = StoredRun.load(find(run, runs_root(runs)))
    match stored.header.kind:
        case "tune":
            return read_tuning(stored)
        case "train":
            return read_training(stored)
        case "lab":
            return read_lab(stored)
        case _:
            return stored
