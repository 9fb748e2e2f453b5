"""Runs on disk: a directory each, appended row by row, resumable, readable again."""

from flopwise.store.catalog import RunSummary, check_tag, find, list_runs, reference, remove, resumable, tag, untag
from flopwise.store.files import check_root, runs_root
from flopwise.store.run import Run
from flopwise.store.stored import StoredRun

__all__ = [
    "Run",
    "RunSummary",
    "StoredRun",
    "check_root",
    "check_tag",
    "find",
    "list_runs",
    "reference",
    "remove",
    "resumable",
    "runs_root",
    "tag",
    "untag",
]
