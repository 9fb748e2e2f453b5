"""Which of the files given are ranks of one job: the others are named, each in a line, and left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flopwise.analysis.ranks.matching import step_keys
from flopwise.analysis.ranks.reading import RankTrace, UnreadableRank
from flopwise.errors import FlopwiseError
from flopwise.records.note import Note
from flopwise.trace.tables import NO_ID

_NAMED = 3  # files of one problem that are named
_APART_NS = 60_000_000_000  # between the traces of two runs; clocks of one job's hosts are closer
_EPOCH_NS = 10**18  # later than 2001: a clock that counts from 1970


class NotTogether(FlopwiseError):
    """The files are not ranks of one job, or do not say what they have in common."""


def selected(read: Sequence[RankTrace | UnreadableRank]) -> tuple[list[RankTrace], list[Note]]:
    """The ranks of the job that most files are of, by rank; and what was left out, and why."""
    notes: list[Note] = []
    unreadable = [one for one in read if isinstance(one, UnreadableRank)]
    notes += _each("unreadable", [_problem(one) for one in unreadable])
    ranks = [one for one in read if isinstance(one, RankTrace)]
    silent = [one for one in ranks if not len(one.events["start_ns"])]
    notes += _each("silent", [f"{_name(one)} has no collectives: left out" for one in silent])
    ranks = [one for one in ranks if one not in silent]
    for separate in (_worlds, _runs, _numbered, _once, _steps):
        ranks, left = separate(ranks)
        notes += left
    if len(ranks) < 2:
        why = f": {notes[0].text}" if notes else ""
        hint = "flopwise explain FILE explains one; name the traces of the job's other ranks, too"
        raise NotTogether(f"of {len(read)} traces fewer than two are ranks of one job{why}", hint)
    return ranks, notes


def _problem(one: UnreadableRank) -> str:
    text = one.problem.replace(one.path, Path(one.path).name)
    return f"{text}: left out"


def _name(one: RankTrace) -> str:
    return Path(one.path).name


def _each(key: str, texts: Sequence[str]) -> list[Note]:
    """A line for each of the first few, and one for the rest."""
    more = [f"and {len(texts) - _NAMED} more files with the same problem"] if len(texts) > _NAMED else []
    return [Note(key, text) for text in (*texts[:_NAMED], *more)]


def _worlds(ranks: list[RankTrace]) -> tuple[list[RankTrace], list[Note]]:
    """One job has one number of ranks."""
    sizes = Counter(one.distributed.world for one in ranks if one.distributed.world)
    if len(sizes) < 2:
        return ranks, []
    world = sizes.most_common(1)[0][0]
    other = [one for one in ranks if one.distributed.world not in (0, world)]
    text = [f"{_name(one)} is of a job of {one.distributed.world} ranks, not {world}: left out" for one in other]
    return [one for one in ranks if one not in other], _each("other_run", text)


def _runs(ranks: list[RankTrace]) -> tuple[list[RankTrace], list[Note]]:
    """Traces of one job are of one time."""
    if any(one.begin_ns < _EPOCH_NS for one in ranks):
        return ranks, []
    clusters: list[list[RankTrace]] = []
    reach = 0
    for one in sorted(ranks, key=lambda one: one.begin_ns):
        if not clusters or one.begin_ns - reach > _APART_NS:
            clusters.append([])
        clusters[-1].append(one)
        reach = max(reach, one.begin_ns + int(one.step_edges[-1]))
    kept = max(clusters, key=len, default=[])
    other = [one for one in ranks if one not in kept]
    text = [f"{_name(one)} was traced at another time than the others: another run, left out" for one in other]
    return [one for one in ranks if one in kept], _each("other_run", text)


def _numbered(ranks: list[RankTrace]) -> tuple[list[RankTrace], list[Note]]:
    """Ranks that neither the trace nor its name tells are numbered by their names' order."""
    if all(one.rank != NO_ID for one in ranks):
        return ranks, []
    free = (number for number in range(2 * len(ranks)) if number not in {one.rank for one in ranks})
    found = [replace(one, rank=next(free)) if one.rank == NO_ID else one for one in sorted(ranks, key=_name)]
    return found, [Note("unnumbered", "some traces do not say their rank: they are numbered by their files' names")]


def _once(ranks: list[RankTrace]) -> tuple[list[RankTrace], list[Note]]:
    kept: dict[int, RankTrace] = {}
    text = []
    for one in sorted(ranks, key=lambda one: (one.rank, len(one.path), one.path)):
        if one.rank in kept:
            text.append(f"rank {one.rank} is there twice: {_name(one)} is left out, {_name(kept[one.rank])} is used")
        else:
            kept[one.rank] = one
    return list(kept.values()), _each("twice", text)


def _steps(ranks: list[RankTrace]) -> tuple[list[RankTrace], list[Note]]:
    """Ranks that have a step in common with the most others."""
    counts = Counter(key for one in ranks for key in step_keys(one))
    if not counts:
        return ranks, []
    common = max(counts, key=lambda key: counts[key])
    other = [one for one in ranks if common not in step_keys(one)]
    text = [
        f"rank {one.rank} was traced in {_range(step_keys(one))}, the others in {common}: left out" for one in other
    ]
    return [one for one in ranks if one not in other], _each("other_steps", text)


def _range(keys: Sequence[str]) -> str:
    """
    >>> _range(["ProfilerStep#3"]), _range(["ProfilerStep#3", "ProfilerStep#4"])
    ('ProfilerStep#3', 'ProfilerStep#3 to ProfilerStep#4')
    """
    return keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
