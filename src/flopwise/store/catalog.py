"""The runs under one root: found by a short name, listed, tagged, removed, resumed."""

import contextlib
import difflib
import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec.workload import Trial
from flopwise.store import files
from flopwise.store.stored import StoredRun, begun_ns, created_ns, has_measured, keys, read_header, sound_header, tally
from flopwise.store.sums import read_sums
from flopwise.store.tags import TAG, read_tags, write_tags

_BEGUN = re.compile(r"\d{8}-\d{6}")
_ID = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9.-]+")
_ABANDONED_S = 3600  # a folder still being built after this long belongs to a process that was killed
_NO_RUNS_YET = "there are no runs yet: flopwise bench makes one"
_BENCH_MAKES_ONE = "flopwise bench makes one; FLOPWISE_RUNS names another folder"


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `flopwise runs`. A run that cannot be read has its reason in `warnings` and no kind."""

    id: str
    path: Path
    kind: str = ""
    name: str = ""
    created_at: str = ""
    created_ns: int
    ok: int = 0
    failed: int = 0
    planned: int = 0
    complete: bool = False
    tags: tuple[str, ...] = ()
    size_bytes: int = 0
    warnings: tuple[str, ...] = ()


def find(ref: str | Path, root: str | Path) -> Path:
    """The run that `ref` names: `last`, `last~1` (the one before), an id or its start, a tag, or a run's path.

    A run that measured nothing is not the last (its steps failed, it was killed, it has only begun): it is found by its id.
    """
    ref, root = str(ref), Path(root)
    back = re.fullmatch(r"last(?:~(\d{1,6}))?", ref)
    if back:
        return _nth_newest(root, int(back[1] or 0))
    if os.sep in ref or os.path.isabs(ref):  # an id or a tag never has one, so no name leads out of the root
        return _run_at(ref)
    tags = {path: read_tags(path).tags for path in run_folders(root)}
    matches = _matches(ref, tags)
    if len(matches) > 1:
        raise FlopwiseError(f"'{ref}' names {len(matches)} runs", f"it could be {_some([p.name for p in matches])}")
    if matches:
        return matches[0]
    if os.path.isdir(ref):
        return _run_at(ref)
    raise _no_such_run(ref, root, tags)


def reference(path: Path, root: str | Path) -> str:
    """The shortest name by which `find` finds this run: last, the start of its id, or its path if it is not in this root."""
    root = Path(root)
    if path.parent.resolve() != root.resolve():
        return min(str(path), os.path.join(os.curdir, os.path.relpath(path)), key=len)
    try:
        if _nth_newest(root, 0).name == path.name:
            return "last"
    except FlopwiseError:  # none has measured anything
        pass
    begun = _BEGUN.match(path.name)
    alike = [one for one in run_folders(root) if begun is not None and one.name.startswith(begun[0])]
    return begun[0] if begun is not None and len(alike) == 1 else path.name


def _matches(ref: str, tags: dict[Path, tuple[str, ...]]) -> list[Path]:
    """The run with this id; else the runs with this tag; else those with an id that begins so."""
    by_id = [path for path in tags if path.name == ref]
    by_tag = [path for path, own in tags.items() if ref in own]
    return by_id or by_tag or [path for path in tags if ref and path.name.startswith(ref)]


def _no_such_run(ref: str, root: Path, tags: dict[Path, tuple[str, ...]]) -> FlopwiseError:
    ids, names = [path.name for path in tags], [tag for own in tags.values() for tag in own]
    close = difflib.get_close_matches(ref[:200], ids + names, n=3, cutoff=0.5) or ids[::-1][:3]
    hint = f"close to it: {_some(close)}; or last, last~1, a tag, a path"
    return FlopwiseError(f"there is no run '{ref}' in {root}", hint if close else _NO_RUNS_YET)


def _run_at(path: str) -> Path:
    if os.path.isfile(os.path.join(path, files.HEADER)):
        return Path(path)
    problem = "is a folder, but not a run: it has no run.json" if os.path.isdir(path) else "is not a folder"
    hint = "flopwise runs lists what there is" + (
        "; flopwise explain B --against A compares traces" if os.path.isfile(path) else ""
    )
    raise FlopwiseError(f"{path} {problem}", hint)


def list_runs(root: str | Path) -> list[RunSummary]:
    """Every run under `root`, the newest first."""
    summaries = (_summary(path) for path in run_folders(Path(root)))
    return sorted(summaries, key=lambda run: (run.created_ns, run.id), reverse=True)


def resumable(root: str | Path, trials: Sequence[Trial], kind: str, finished: bool = False) -> Path | None:
    """The newest unfinished run of this kind with exactly this plan, which no process is writing; or a `finished` one."""
    wanted = keys(trials)
    for path in _newest_first(Path(root)):
        with contextlib.suppress(FlopwiseError):  # one that cannot be read is not resumed
            header = read_header(path)
            if header.kind != kind or len(header.trials) != len(wanted) or keys(header.trials) != wanted:
                continue
            if os.path.lexists(path / files.POINTS) and not (path / files.POINTS).is_file():
                continue
            if not files.is_locked(path / files.LOCK) and (finished or not StoredRun.load(path).complete):
                return path
    return None


def check_tag(tag: str) -> None:
    """Raise unless a run can have this tag."""
    if not TAG.fullmatch(tag):
        allowed = "allowed: 1 to 64 letters, digits, dots, _ and -, not beginning with 'last'"
        raise FlopwiseError(f"'{tag}' cannot be a tag", allowed)


def tag(root: str | Path, ref: str | Path, tag: str) -> Path:
    """Give a run a tag; a run that had it loses it. Returns the run."""
    root = Path(root)
    check_tag(tag)
    with _changing(root):
        path = _inside(root, find(ref, root))
        runs = run_folders(root)
        if tag in (run.name for run in runs):
            raise FlopwiseError(f"'{tag}' cannot be a tag: a run has this id", "choose another name")
        # Given first, taken second: a kill in between leaves the tag twice, which `find` reports, and never loses it.
        write_tags(path, (*(t for t in read_tags(path).tags if t != tag), tag))
        for other in runs:
            if other.name != path.name and tag in read_tags(other).tags:
                write_tags(other, tuple(t for t in read_tags(other).tags if t != tag))
    return path


def untag(root: str | Path, tag: str) -> Path:
    """Take a tag away. Returns the run that had it."""
    root = Path(root)
    with _changing(root):
        holders = [path for path in run_folders(root) if tag in read_tags(path).tags]
        for path in holders:
            write_tags(path, tuple(t for t in read_tags(path).tags if t != tag))
    if not holders:
        raise FlopwiseError(f"no run in {root} has the tag '{tag}'", "flopwise runs lists the tags")
    return holders[0]


def remove(root: str | Path, refs: Sequence[str | Path]) -> list[Path]:
    """Delete runs: all of them or, when one may not be deleted, none. Returns the paths they had."""
    root = Path(root)
    with _changing(root), contextlib.ExitStack() as held:
        paths = list(dict.fromkeys(_inside(root, find(ref, root)) for ref in refs))
        for path in paths:
            held.callback(files.release, _lock_to_remove(path))
        for path in paths:
            # A rename takes it out of every list at once; after a kill, the next removal deletes the hidden folder.
            with files.explain_errors("remove", path):
                os.rename(path, root / f"{files.REMOVED}{path.name}-{secrets.token_hex(4)}")
        held.close()
        _sweep_out(root)
    return paths


def _lock_to_remove(path: Path) -> int | None:
    with files.explain_errors("remove", path):
        return files.lock_run(path, "wait until it ends, then remove it")


def _sweep_out(root: Path) -> None:
    """Delete what was renamed for deletion, by this process or by one that was killed, and what was never finished."""
    with files.explain_errors("clean up", root):
        for entry in root.iterdir():
            abandoned = entry.name.startswith(files.BUILDING) and time.time() - entry.lstat().st_mtime > _ABANDONED_S
            if entry.name.startswith(files.REMOVED) or abandoned:
                shutil.rmtree(entry)


def run_folders(root: Path) -> list[Path]:
    """The folders under `root` that are runs, whole or damaged. Links are not followed: they may lead outside."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise FlopwiseError(f"cannot read {root}: {reason}", "FLOPWISE_RUNS names the folder of runs") from None
    return [root / e.name for e in entries if e.is_dir(follow_symlinks=False) and _is_run(e)]


def _is_run(entry: "os.DirEntry[str]") -> bool:
    hidden = entry.name.startswith(".")
    return not hidden and (bool(_ID.fullmatch(entry.name)) or os.path.isfile(os.path.join(entry.path, files.HEADER)))


def _newest_first(root: Path) -> list[Path]:
    """The runs by the time they were begun; one whose header cannot be read has it in its id."""
    by_time: list[tuple[int, Path]] = []
    for path in run_folders(root):
        try:
            by_time.append((created_ns(path), path))
        except FlopwiseError:
            if begun := begun_ns(path.name):
                by_time.append((begun + 10**9 - 1, path))  # it is not passed over
    return [path for _, path in sorted(by_time, reverse=True)]


def _nth_newest(root: Path, back: int) -> Path:
    """Of the runs that measured something."""
    runs = _newest_first(root)
    good = (path for path in runs if _is_something(path))
    found = list(itertools.islice(good, back + 1))
    if back < len(found):
        return found[back]
    if not found and runs:
        why = f"{runs[0].name} failed, was ended before its first measurement, or has only begun"
        raise FlopwiseError(f"no run in {root} has measured anything", why)
    if not found:
        raise FlopwiseError(f"there are no runs in {root}", _BENCH_MAKES_ONE)
    raise FlopwiseError(f"there is no run {back} before the last in {root}", f"allowed: last to last~{len(found) - 1}")


def _is_something(path: Path) -> bool:
    try:
        return has_measured(path)
    except FlopwiseError:  # it cannot be read: to show the one before it would hide that
        return True


def _summary(path: Path) -> RunSummary:
    changed_ns = 0
    with contextlib.suppress(OSError):  # removed while we look
        changed_ns = path.lstat().st_mtime_ns
    tags = read_tags(path)
    known: dict[str, Any] = {"id": path.name, "path": path, "tags": tags.tags, "size_bytes": _size(path)}
    try:
        header, damage = sound_header(path, read_sums(path))
        begun = created_ns(path) if not damage else header.created_ns
        counted = msgspec.structs.asdict(tally(path, header, damage))
    except FlopwiseError as error:
        return RunSummary(
            **known, created_ns=begun_ns(path.name) or changed_ns, warnings=(error.message, *tags.warnings)
        )
    counted["warnings"] += tags.warnings
    known |= {"kind": header.kind, "name": header.name, "created_at": header.created_at}
    return RunSummary(**known, **counted, created_ns=begun)


def _size(path: Path) -> int:
    """Bytes of every file in a folder; one that vanishes while we look counts for nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _inside(root: Path, path: Path) -> Path:
    """The path, if it is a run that lies directly under `root`."""
    for run in run_folders(root):
        if run.name == path.name and os.path.realpath(run) == os.path.realpath(path) and not path.is_symlink():
            return run
    hint = "only runs in this folder are changed; FLOPWISE_RUNS names another"
    raise FlopwiseError(f"{path} is not a run in {root}", hint)


@contextlib.contextmanager
def _changing(root: Path) -> Iterator[None]:
    """One process at a time changes tags or removes runs."""
    if not root.is_dir():
        raise FlopwiseError(f"there are no runs in {root}", _BENCH_MAKES_ONE)
    with files.explain_errors("change", root):
        try:
            lock = files.take_lock(root / ".lock", wait_s=5.0)
        except files.BusyError:
            raise FlopwiseError(f"{root} is being changed by another process", "try again") from None
        try:
            yield
        finally:
            files.release(lock)


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
