"""The runs under one root: found by a short name, listed, tagged, removed, resumed."""

import contextlib
import difflib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec.workload import Trial
from flopwise.store import files
from flopwise.store.stored import UNREADABLE, StoredRun, created_ns, keys, read_header, tally

_ID = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9.-]+")
_TAG = re.compile(r"(?!last|\.{1,2}$)[A-Za-z0-9._-]{1,64}")
_ABANDONED_S = 3600  # a folder still being built after this long belongs to a process that was killed


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


class _Tags(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = 1
    tags: tuple[str, ...] = ()


def find(ref: str | Path, root: str | Path) -> Path:
    """The run that `ref` names: `last`, `last~1` (the one before), an id or its start, a tag, or a run's path."""
    ref, root = str(ref), Path(root)
    back = re.fullmatch(r"last(?:~(\d{1,6}))?", ref)
    if back:
        return _nth_newest(root, int(back[1] or 0))
    if os.sep in ref or os.path.isabs(ref):  # an id or a tag never has one, so no name leads out of the root
        return _run_at(ref)
    runs = {path.name: path for path in _run_folders(root)}
    tags = {path: read_tags(path) for path in runs.values()}
    candidates = (
        [runs[ref]] if ref in runs else [],
        [path for path in runs.values() if ref in tags[path]],
        [path for name, path in runs.items() if ref and name.startswith(ref)],
    )
    found = next((paths for paths in candidates if paths), [])
    if len(found) == 1:
        return found[0]
    if found:
        raise FlopwiseError(f"'{ref}' names {len(found)} runs", f"it could be {_some(sorted(p.name for p in found))}")
    if os.path.isdir(ref):
        return _run_at(ref)
    names = [*runs, *(tag for own in tags.values() for tag in own)]
    close = difflib.get_close_matches(ref[:200], names, n=3, cutoff=0.5) or sorted(runs, reverse=True)[:3]
    raise FlopwiseError(
        f"there is no run '{ref}' in {root}",
        f"close to it: {_some(close)}; or last, last~1, a tag, a path"
        if close
        else "there are no runs yet: flopwise bench makes one",
    )


def _run_at(path: str) -> Path:
    if os.path.isfile(os.path.join(path, files.HEADER)):
        return Path(path)
    what = "is a folder, but not a run: it has no run.json" if os.path.isdir(path) else "is not a folder"
    raise FlopwiseError(f"{path} {what}", "flopwise runs lists what there is")


def list_runs(root: str | Path) -> list[RunSummary]:
    """Every run under `root`, the newest first."""
    return sorted(
        (_summary(path) for path in _run_folders(Path(root))), key=lambda s: (s.created_ns, s.id), reverse=True
    )


def resumable(root: str | Path, trials: Sequence[Trial], kind: str) -> Path | None:
    """The newest unfinished run of this kind with exactly this plan, which no process is writing."""
    wanted = keys(trials)
    for path in _newest_first(Path(root)):
        with contextlib.suppress(FlopwiseError):  # one that cannot be read is not resumed
            header = read_header(path)
            if header.kind != kind or len(header.trials) != len(wanted) or keys(header.trials) != wanted:
                continue
            if not files.is_locked(path / files.LOCK) and not StoredRun.load(path).complete:
                return path
    return None


def check_tag(tag: str) -> None:
    """Raise unless a run can have this tag."""
    if not _TAG.fullmatch(tag):
        raise FlopwiseError(
            f"'{tag}' cannot be a tag", "allowed: 1 to 64 letters, digits, dots, _ and -, not beginning with 'last'"
        )


def tag(root: str | Path, ref: str | Path, tag: str) -> Path:
    """Give a run a tag; a run that had it loses it. Returns the run."""
    root = Path(root)
    check_tag(tag)
    with _changing(root):
        path = _inside(root, find(ref, root))
        runs = _run_folders(root)
        if tag in (run.name for run in runs):
            raise FlopwiseError(f"'{tag}' cannot be a tag: a run has this id", "choose another name")
        # Given first, taken second: a kill in between leaves the tag twice, which `find` reports, and never loses it.
        _write_tags(path, (*(t for t in read_tags(path) if t != tag), tag))
        for other in runs:
            if other.name != path.name and tag in read_tags(other):
                _write_tags(other, tuple(t for t in read_tags(other) if t != tag))
    return path


def untag(root: str | Path, tag: str) -> Path:
    """Take a tag away. Returns the run that had it."""
    root = Path(root)
    with _changing(root):
        holders = [path for path in _run_folders(root) if tag in read_tags(path)]
        for path in holders:
            _write_tags(path, tuple(t for t in read_tags(path) if t != tag))
    if not holders:
        raise FlopwiseError(f"no run in {root} has the tag '{tag}'", "flopwise runs lists the tags")
    return holders[0]


def read_tags(path: Path) -> tuple[str, ...]:
    """A run's tags; a damaged file of tags counts as none."""
    try:
        found = msgspec.json.decode(files.read_whole(path / files.TAGS, 2**20), type=_Tags).tags
    except (OSError, *UNREADABLE):
        return ()
    return tuple(tag for tag in found if _TAG.fullmatch(tag))


def remove(root: str | Path, refs: Sequence[str | Path]) -> list[Path]:
    """Delete runs: all of them or, when one may not be deleted, none. Returns the paths they had."""
    root = Path(root)
    with _changing(root), contextlib.ExitStack() as held:
        paths = list(dict.fromkeys(_inside(root, find(ref, root)) for ref in refs))
        for path in paths:
            held.callback(files.release, _lock_to_remove(path))
        for path in paths:
            # A rename takes it out of every list at once; after a kill, the next removal deletes the hidden folder.
            with files.explained("remove", path):
                os.rename(path, root / f"{files.REMOVED}{path.name}-{secrets.token_hex(4)}")
        held.close()
        _sweep_out(root)
    return paths


def _lock_to_remove(path: Path) -> int | None:
    with files.explained("remove", path):
        try:
            return files.take_lock(path / files.LOCK)
        except files.BusyError:
            raise FlopwiseError(
                f"{path} is being written by another process", "wait until it ends, then remove it"
            ) from None


def _sweep_out(root: Path) -> None:
    """Delete what was renamed for deletion, by this process or by one that was killed, and what was never finished."""
    with files.explained("clean up", root):
        for entry in root.iterdir():
            abandoned = entry.name.startswith(files.BUILDING) and time.time() - entry.lstat().st_mtime > _ABANDONED_S
            if entry.name.startswith(files.REMOVED) or abandoned:
                shutil.rmtree(entry)


def _run_folders(root: Path) -> list[Path]:
    """The folders under `root` that are runs, whole or damaged. Links are not followed: they may lead outside."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FlopwiseError(
            f"cannot read {root}: {(error.strerror or '').lower()}", "FLOPWISE_RUNS names the folder of runs"
        ) from None
    return [root / e.name for e in entries if e.is_dir(follow_symlinks=False) and _is_run(e)]


def _is_run(entry: "os.DirEntry[str]") -> bool:
    hidden = entry.name.startswith(".")
    return not hidden and (bool(_ID.fullmatch(entry.name)) or os.path.isfile(os.path.join(entry.path, files.HEADER)))


def _newest_first(root: Path) -> list[Path]:
    """The readable runs by the time they were begun."""
    born: list[tuple[int, Path]] = []
    for path in _run_folders(root):
        with contextlib.suppress(FlopwiseError):
            born.append((created_ns(path), path))
    return [path for _, path in sorted(born, reverse=True)]


def _nth_newest(root: Path, back: int) -> Path:
    runs = _newest_first(root)
    if back < len(runs):
        return runs[back]
    if not runs:
        raise FlopwiseError(
            f"there are no runs in {root}", "flopwise bench makes one; FLOPWISE_RUNS names another folder"
        )
    raise FlopwiseError(f"there is no run {back} before the last in {root}", f"allowed: last to last~{len(runs) - 1}")


def _summary(path: Path) -> RunSummary:
    born = 0
    with contextlib.suppress(OSError):  # removed while we look
        born = path.lstat().st_mtime_ns
    try:
        header = read_header(path)
        born = header.created_ns
        count = tally(path, header)
    except FlopwiseError as error:
        return RunSummary(
            id=path.name,
            path=path,
            created_ns=born,
            tags=read_tags(path),
            size_bytes=_size(path),
            warnings=(error.message,),
        )
    return RunSummary(
        id=path.name,
        path=path,
        kind=header.kind,
        name=header.name,
        created_at=header.created_at,
        created_ns=header.created_ns,
        ok=count.ok,
        failed=count.failed,
        planned=count.planned,
        complete=count.complete,
        tags=read_tags(path),
        size_bytes=_size(path),
        warnings=count.warnings,
    )


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
    for run in _run_folders(root):
        if run.name == path.name and os.path.realpath(run) == os.path.realpath(path) and not path.is_symlink():
            return run
    raise FlopwiseError(
        f"{path} is not a run in {root}", "only runs in this folder are changed; FLOPWISE_RUNS names another"
    )


def _write_tags(path: Path, tags: tuple[str, ...]) -> None:
    with files.explained("write the tags of", path):
        files.write_whole(path / files.TAGS, msgspec.json.encode(_Tags(tags=tags)))


@contextlib.contextmanager
def _changing(root: Path) -> Iterator[None]:
    """One process at a time changes tags or removes runs."""
    if not root.is_dir():
        raise FlopwiseError(
            f"there are no runs in {root}", "flopwise bench makes one; FLOPWISE_RUNS names another folder"
        )
    with files.explained("change", root):
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
