"""The files that targets mean, and whether they may be ranks of one job."""

import re
from collections.abc import Sequence
from pathlib import Path

from flopwise.analysis.ranks.reading import rank_in_name
from flopwise.analysis.reading import is_folder_of_traces, trace_of, traces_in
from flopwise.errors import FlopwiseError
from flopwise.store import StoredRun
from flopwise.trace.read import is_trace_file
from flopwise.trace.tables import NO_ID

_DIGITS = re.compile(r"\d+")


def files_of(target: Path) -> list[Path]:
    """Of a folder its traces, of anything else itself."""
    return traces_in(target) if is_folder_of_traces(target) else [target]


def _of_run(target: object, runs: str | Path | None) -> list[Path]:
    if not isinstance(target, str | Path | StoredRun):
        return []
    if not isinstance(target, StoredRun) and files_of(path := Path(target).expanduser()) != [path]:
        return []
    try:
        first, point = trace_of(target, runs)
    except FlopwiseError:
        return []
    if point is not None and point.loop is not None and point.loop.rank_walls_ns:  # a script under torchrun
        return traces_in(first.parent)
    if point is None or len(point.ranks) < 2:
        return []
    return [first.with_name(row.trace_file) for row in point.ranks if row.trace_file]


def rank_files(targets: Sequence[object], runs: str | Path | None = None) -> list[Path]:
    """Of a folder of traces its files, of several files themselves, of a run of several ranks each rank's; none where they
    cannot be ranks of one job.

    Files of one job are named alike, up to numbers, or after their rank.
    """
    if len(targets) == 1 and (files := _of_run(targets[0], runs)):
        return files
    if any(not isinstance(target, str | Path) for target in targets):
        return []
    paths = [Path(str(target)).expanduser() for target in targets]
    files = list(dict.fromkeys(file for path in paths for file in files_of(path)))
    if len(files) < 2 or not all(map(is_trace_file, files)):
        return []
    if len(paths) == 1:  # a folder
        return files
    alike = len({_DIGITS.sub("#", file.name) for file in files}) == 1
    return files if alike or all(rank_in_name(file.name) != NO_ID for file in files) else []
