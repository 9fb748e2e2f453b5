"""Several ranks of one job explained together: each file reduced in a process of its own, then matched, aligned, compared."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import polars as pl

from flopwise import units
from flopwise.analysis.ranks.bandwidth import across_hosts, algorithm_bytes_s, link_limit
from flopwise.analysis.ranks.clocks import Clocks, aligned_clocks
from flopwise.analysis.ranks.group_order import groups_out_of_order
from flopwise.analysis.ranks.matching import Matched, matched
from flopwise.analysis.ranks.reading import Group, RankTrace, UnreadableRank, read_rank
from flopwise.analysis.ranks.selection import NotTogether, selected
from flopwise.analysis.ranks.states import COMPUTE, COPY, IDLE, INPUT, TRANSFER, WAITING
from flopwise.analysis.ranks.stragglers import Blame, blamed, stragglers
from flopwise.analysis.ranks.timeline import ranks_timeline
from flopwise.analysis.ranks.waiting import Waits, analysed_steps, parts_of_steps, waits
from flopwise.capture.runners import LOCAL, RAY
from flopwise.errors import FlopwiseError
from flopwise.lm.jobs import run_jobs
from flopwise.records.note import Note
from flopwise.records.ranks import CollectiveTime, GroupKind, GroupTime, RanksExplanation, RankTime, Straggler
from flopwise.spec import fields
from flopwise.spec.links import Links
from flopwise.trace.phases import PHASES
from flopwise.trace.tables import NO_ID
from flopwise.work.collective import bus_factor

MOST_ROWS = 2_000_000  # collectives of all ranks together that are held: 0.5 GB
MOST_STATES = 8_000_000  # of all ranks together
_LEAST_EVENTS, _LEAST_STATES = 200, 1000  # of one rank, however many there are
_SMALL_BYTES, _FEW = 8 << 20, 16  # of all files, and files: starting processes takes longer than reading them
MOST_LISTED = 100  # collectives that the answer lists
_LOOSE_NS, _LOOSE = 1_000_000, 0.02  # collectives that end further apart than both, in a share of the step, are not one
_NAMED = 8


def read_ranks(
    paths: Sequence[str | Path], processes: int | None = None, on: str = LOCAL
) -> list[RankTrace | UnreadableRank]:
    """Every file reduced; in processes of their own, unless all are small, or on the nodes of a Ray cluster."""
    n = max(1, len(paths))
    jobs = [(str(path), max(_LEAST_EVENTS, MOST_ROWS // n), max(_LEAST_STATES, MOST_STATES // n)) for path in paths]
    sizes = [os.path.getsize(path) for path in paths if os.path.isfile(path)]
    if on == RAY or on.startswith("ray://"):
        from flopwise.analysis.ranks.spread import read_on_ray

        return list(read_on_ray(jobs, "" if on == RAY else on))
    if on != LOCAL:
        raise FlopwiseError(f"on = {fields.show(on)} is not allowed here", f"allowed: {LOCAL}, {RAY}, ray://HOST:PORT")
    if processes is None and len(jobs) <= _FEW and sum(sizes) < _SMALL_BYTES:
        processes = 1
    return list(run_jobs(read_rank, jobs, processes))


def explain_ranks(
    paths: Sequence[str | Path],
    *,
    name: str = "",
    link: Links | None = None,
    gpu: str = "",
    processes: int | None = None,
    on: str = LOCAL,
) -> RanksExplanation:
    """What the traces of a job's ranks say together; raises NotTogether where they are none."""
    ranks, notes = selected(read_ranks(paths, processes, on))
    found = matched(ranks)
    clocks = aligned_clocks(found, len(ranks))
    waited = waits(ranks, found, clocks, analysed_steps(ranks))
    _check(found, clocks, waited)
    blames = blamed(waited, clocks.residual_ns)
    costly = stragglers(ranks, waited, found, blames, clocks.residual_ns)
    world = max((one.distributed.world for one in ranks), default=0)
    missing = tuple(sorted(set(range(world)) - {one.rank for one in ranks}))
    first = costly[0] if costly else None
    gpus = Counter(one.gpu for one in ranks if one.gpu)
    told = [*notes, *_notes(ranks, found, clocks, missing, gpus)]
    explained = RanksExplanation(
        name=name or _common_name(ranks),
        source=ranks[0].source,
        gpu=gpus.most_common(1)[0][0] if gpus else "",
        world=world,
        missing=missing,
        steps=waited.steps,
        step_ns=waited.step_ns,
        ranks=_rank_times(ranks, waited, found, clocks),
        groups=_group_kinds(ranks, waited, found, world, (link, gpu)),
        collectives=_collectives(ranks, waited, found, blames),
        collectives_found=waited.rows.filter("matched")["collective"].n_unique(),
        unmatched=waited.rows.filter(~pl.col("matched")).height,
        straggler=first,
        stragglers=costly[1:],
        late_groups=tuple(group_name(found.groups, one) for one in groups_out_of_order(waited)),
        clock_residual_ns=clocks.residual_ns,
        clocks_joined=clocks.joined,
        verdict="",
        notes=tuple(note.text for note in told),
        note_keys=tuple(note.key for note in told),
        timeline=ranks_timeline(ranks, waited, first.rank if first is not None else NO_ID),
    )
    return _with_verdict(explained)


def _check(found: Matched, clocks: Clocks, waited: Waits) -> None:
    hint = "flopwise explain FILE explains each alone"
    if not waited.rows.filter("matched").height:
        raise NotTogether("the traces have no collective in common", hint)
    nameless = any(not group.name for group in found.groups)
    if nameless and clocks.residual_ns > max(_LOOSE_NS, _LOOSE * waited.step_ns):
        apart = units.duration(clocks.residual_ns)
        problem = f"the traces name no process groups, and by order their collectives end {apart} apart"
        raise NotTogether(problem, f"events may be missing in them; {hint}")


def _common_name(ranks: Sequence[RankTrace]) -> str:
    """The files' names with a star for what differs.

    >>> from types import SimpleNamespace
    >>> _common_name([SimpleNamespace(path=f"a/rank{n}.json") for n in (0, 1)])
    'rank*.json'
    """
    names = [Path(one.path).name for one in ranks]
    start = _alike(names)
    end = _alike([name[start:][::-1] for name in names])
    return f"{names[0][:start]}*{names[0][len(names[0]) - end :]}"


def _alike(names: Sequence[str]) -> int:
    """How many letters all begin with."""
    return next(
        (i for i, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), min(map(len, names))
    )


def group_name(groups: Sequence[Group], number: int) -> str:
    """As the trace calls it; of collectives without a group, their stream."""
    group = groups[number]
    if group.name:
        words = group.description if group.description not in ("", "undefined") else ""
        return f"{group.name} ({words})" if words else group.name
    streams = sum(not one.name for one in groups)
    return "of all ranks" if streams == 1 else f"of stream {group.stream + 1}"


def _rank_times(ranks: Sequence[RankTrace], waited: Waits, found: Matched, clocks: Clocks) -> tuple[RankTime, ...]:
    rows, steps = waited.rows, max(1, len(waited.steps))
    by_rank = rows.group_by("rank", "group", "phase").agg(pl.col("exposed_ns", "hidden_ns").sum()).sort("exposed_ns")
    spent: dict[int, list[GroupTime]] = {}
    for rank, group, phase, exposed, hidden in by_rank.reverse().iter_rows():
        one = GroupTime(
            group=group_name(found.groups, group),
            phase=PHASES[phase],
            exposed_ns=exposed / steps,
            hidden_ns=hidden / steps,
        )
        spent.setdefault(rank, []).append(one)
    whole = rows.filter("matched")
    last = whole.filter(pl.col("start_ns") == pl.col("start_ns").max().over("collective"))["rank"].value_counts()
    lasts = dict(last.iter_rows())
    taken = dict(whole["rank"].value_counts().iter_rows())
    times = []
    for place, (rank, aligned) in enumerate(zip(ranks, waited.ranks, strict=True)):
        parts = parts_of_steps(aligned)
        times.append(
            RankTime(
                rank=rank.rank,
                path=rank.path,
                host=rank.distributed.host,
                gpu=rank.gpu,
                step_ns=float(parts.sum()),
                compute_ns=float(parts[COMPUTE]),
                transfer_ns=float(parts[TRANSFER]),
                waiting_ns=float(parts[WAITING]),
                input_ns=float(parts[COPY] + parts[INPUT]),
                idle_ns=float(parts[IDLE]),
                hidden_ns=sum(one.hidden_ns for one in spent.get(place, ())),
                clock_ahead_ns=float(clocks.ahead_ns[place]),
                last=lasts.get(place, 0),
                collectives=taken.get(place, 0),
                communication=tuple(spent.get(place, ())),
            )
        )
    return tuple(times)


def _each_collective(waited: Waits) -> pl.DataFrame:
    """A row per collective."""
    rows = waited.rows.filter("matched").sort("collective", "start_ns", maintain_order=True)
    return rows.group_by("collective", maintain_order=True).agg(
        pl.col("group", "kind", "step", "phase").first(),
        pl.len().alias("n"),
        pl.col("bytes").max(),
        pl.col("waiting_ns").mean(),
        pl.col("waiting_ns").max().alias("longest_ns"),
        pl.col("transfer_ns").median(),
        pl.col("exposed_ns", "hidden_ns").mean(),
        pl.col("rank").last().alias("last"),
        pl.col("rank").unique().alias("ranks"),
    )


def _size(group: Group, present: int) -> int:
    return max(group.size, present)


def _collectives(
    ranks: Sequence[RankTrace], waited: Waits, found: Matched, blames: dict[int, Blame]
) -> tuple[CollectiveTime, ...]:
    each = _each_collective(waited).with_columns(took=pl.col("longest_ns") + pl.col("transfer_ns"))
    result = []
    for row in each.sort("took", "collective", descending=[True, False]).head(MOST_LISTED).iter_rows(named=True):
        kind, size = found.kinds[row["kind"]], _size(found.groups[row["group"]], row["n"])
        n_bytes = row["bytes"] if row["bytes"] > 0 else None
        rate = algorithm_bytes_s(n_bytes, row["transfer_ns"])
        blame = blames.get(row["collective"])
        result.append(
            CollectiveTime(
                group=group_name(found.groups, row["group"]),
                kind=kind,
                step=found.steps[row["step"]],
                ranks=row["n"],
                size=size,
                bytes=n_bytes,
                waiting_ns=row["waiting_ns"],
                longest_waiting_ns=row["longest_ns"],
                transfer_ns=row["transfer_ns"],
                last_rank=ranks[row["last"]].rank,
                cause=blame.cause if blame is not None and blame.rank == row["last"] else "",
                algorithm_bytes_s=rate,
                bus_bytes_s=rate * bus_factor(kind, size) if rate is not None else None,
            )
        )
    return tuple(result)


def _group_kinds(
    ranks: Sequence[RankTrace], waited: Waits, found: Matched, world: int, link: tuple[Links | None, str]
) -> tuple[GroupKind, ...]:
    steps = max(1, len(waited.steps))
    each = _each_collective(waited).with_columns(known=pl.when(pl.col("bytes") > 0).then("bytes").otherwise(0))
    moved = pl.col("transfer_ns").filter(pl.col("known") > 0).sum()
    both = each.group_by("group", "kind", maintain_order=True).agg(
        pl.len().alias("count"),
        pl.col("n").max(),
        pl.col("known").sum(),
        moved.alias("moved_ns"),
        pl.col("phase").mode().first(),
        pl.col("waiting_ns", "transfer_ns", "exposed_ns", "hidden_ns").sum(),
        pl.col("ranks").first(),
    )
    result = []
    for row in both.iter_rows(named=True):
        kind, size = found.kinds[row["kind"]], _size(found.groups[row["group"]], row["n"])
        rate = algorithm_bytes_s(row["known"], row["moved_ns"])
        across = across_hosts({ranks[place].distributed.host for place in row["ranks"]}, world)
        result.append(
            GroupKind(
                group=group_name(found.groups, row["group"]),
                kind=kind,
                phase=PHASES[row["phase"]],
                ranks=size,
                present=row["n"],
                count=row["count"] / steps,
                bytes=row["known"] / steps or None,
                waiting_ns=row["waiting_ns"] / steps,
                transfer_ns=row["transfer_ns"] / steps,
                exposed_ns=row["exposed_ns"] / steps,
                hidden_ns=row["hidden_ns"] / steps,
                bus_bytes_s=rate * bus_factor(kind, size) if rate is not None else None,
                link_bytes_s=link_limit(link[0], link[1] or ranks[0].gpu, across),
                across_hosts=across,
            )
        )
    return tuple(sorted(result, key=lambda one: -(one.waiting_ns + one.transfer_ns)))


def _notes(
    ranks: Sequence[RankTrace], found: Matched, clocks: Clocks, missing: Sequence[int], gpus: Counter[str]
) -> list[Note]:
    cases = (
        (
            missing,
            "missing",
            f"{numbers_text(missing)} of {len(ranks) + len(missing)} {'has' if len(missing) == 1 else 'have'} no trace here",
        ),
        (not clocks.joined, "clocks", "collectives do not join all ranks: some clocks are taken as they are"),
        (found.odd, "odd", f"{units.several(found.odd, 'collective')} of another kind on each rank: not matched"),
        (len(gpus) > 1, "gpus", f"ranks are on different GPUs: {', '.join(sorted(gpus))}"),
        (
            any(one.events_left_out for one in ranks),
            "early",
            "of ranks with many collectives, the earliest are left out",
        ),
    )
    return [Note(key, text) for holds, key, text in cases if holds]


def numbers_text(ranks: Sequence[int]) -> str:
    """
    >>> numbers_text([3]), numbers_text([3, 5])
    ('rank 3', 'ranks 3, 5')
    """
    some = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


def _with_verdict(e: RanksExplanation) -> RanksExplanation:
    share = units.percent(e.mean_ns("waiting") / max(1.0, e.mean_ns("step")), 0)
    if e.straggler is None:
        who = "no rank that is here" if e.missing else "no rank"
        text = f"{who} holds the others up: they wait for each other {share} of the step"
        if e.missing:
            absent = numbers_text(e.missing)
            text = f"{text}. What {absent} did is not known: a wait for {absent} is counted as communication here"
    else:
        text = f"{straggler_text(e.straggler)}. Waiting takes {share} of the mean rank's step"
    return msgspec.structs.replace(e, verdict=text)


def straggler_text(one: Straggler) -> str:
    """Who it is, and why."""
    if one.rank < 0:
        return f"a slow link holds the others up: {one.because}"
    last = f"last in {one.last} of {units.several(one.collectives, 'collective')}"
    return f"the others wait for rank {one.rank}, {last}: {one.because}"
