"""Runs on disk: a directory each, appended row by row, resumable, readable again."""

from flopwise.store.catalog import (
    RunSummary,
    check_tag,
    find,
    list_runs,
    reference,
    remove,
    resumable,
    run_folders,
    tag,
    untag,
)
from flopwise.store.check import RunCheck, check_run
from flopwise.store.files import check_root, runs_root
from flopwise.store.run import Run
from flopwise.store.stored import StoredRun

__all__ = [
    "Run",
    "RunCheck",
    "RunSummary",
    "StoredRun",
    "check_root",
    "check_run",
    "check_tag",
    "find",
    "list_runs",
    "reference",
    "remove",
    "resumable",
    "run_folders",
    "runs_root",
    "tag",
    "untag",
]
