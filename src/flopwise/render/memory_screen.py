"""A memory report on one screen."""

from pathlib import Path

from flopwise import units
from flopwise.records.run import OK
from flopwise.render.account_screen import best_effects, effect_changes
from flopwise.render.memory_view import subject
from flopwise.render.names import stored_in
from flopwise.render.screen import LIMIT, MEASURED, NOW, PREDICTED, REACHABLE, SPECIFIED, Figure, Part, Screen, sentence
from flopwise.snapshot.answers import DeviceMemory, MemoryReport
from flopwise.spec.gpu import find_gpu


def memory_screen(report: MemoryReport) -> Screen:
    """Who holds the peak of the first device, and what lowers it."""
    first = next(iter(report.devices), None)
    effects = best_effects(report.levers)
    stored = stored_in(Path(report.path).parent.parent) if report.label and report.path else ""
    return Screen(
        title=f"{subject(report)}: memory",
        verdict=_verdict(report, first),
        unit="bytes",
        figures=(*_now(report, first), *_reachable(report, first), *_limit(report)),
        parts_title=f"Who holds the {units.size(first.peak.allocated_bytes)}" if first is not None else "",
        parts=_parts(first) if first is not None else (),
        changes_title="What lowers the peak (predicted, each alone)" if effects else "",
        changes=effect_changes(effects),
        notes=tuple(filter(None, (*_doubts(report, first), *report.notes, stored))),
    )


def _doubts(report: MemoryReport, d: DeviceMemory | None) -> list[str]:
    """How far the owners of a snapshot are known, and which device is shown of several."""
    if d is None or d.exact or report.obtained != MEASURED:
        return []
    known, guessed = units.percent(d.known_share, 0), units.percent(d.guessed_share, 0)
    by_size = f", guessed from the size alone for {guessed}" if d.guessed_share else ""
    many = len(report.devices)
    others = f"{many} devices; this is device {d.device}, with the highest peak. --device cuda:N shows another."
    return [f"Owner known for {known} of the peak{by_size}.", *([others] if many > 1 else []), *map(sentence, d.notes)]


def _verdict(report: MemoryReport, d: DeviceMemory | None) -> str:
    if d is None:
        return f"{report.status}: {report.reason}."
    peak = d.peak
    owner = max(peak.owners, key=lambda name: peak.owners[name], default="")
    share = units.percent(peak.owners.get(owner, 0) / max(peak.allocated_bytes, 1), 0)
    words = [f"{share} of the peak is {owner}." if owner else "Nothing is allocated."]
    if d.ooms:
        words.insert(0, f"Out of memory: {units.size(d.ooms[0].asked_bytes)} more were asked for.")
    elif report.status != OK:
        words.insert(0, f"{report.status}: {report.reason}.")
    if (more := d.growth.bytes_per_step or 0) > 0:
        words.append(f"Memory grows by {units.size(more)} per step.")
    return " ".join(words)


def _now(report: MemoryReport, d: DeviceMemory | None) -> list[Figure]:
    if d is None:
        found = report.predictions[-1] if report.predictions else None
        return [Figure(NOW, found.peak.total_bytes, PREDICTED, note="what it would need")] if found else []
    where = f"the peak, in {d.peak.phase}" if d.peak.phase else "the peak"
    return [Figure(NOW, d.peak.allocated_bytes, report.obtained, note=where)]


def _reachable(report: MemoryReport, d: DeviceMemory | None) -> list[Figure]:
    """With the best lever alone: what is there less what that saves."""
    best = next(iter(best_effects(report.levers)), None)
    if best is None or (d is not None and best.saved_bytes >= d.peak.allocated_bytes):
        return []
    left = d.peak.allocated_bytes - best.saved_bytes if d is not None else best.peak_bytes
    return [Figure(REACHABLE, left, PREDICTED, note="with change 1 alone")]


def _limit(report: MemoryReport) -> list[Figure]:
    gpu = find_gpu(report.where) if report.where else None
    known = gpu is not None and gpu.memory_bytes is not None
    return [Figure(LIMIT, gpu.memory_bytes, SPECIFIED, note=gpu.title)] if gpu and known and gpu.memory_bytes else []


def _parts(d: DeviceMemory) -> tuple[Part, ...]:
    return tuple(Part(owner, size) for owner, size in sorted(d.peak.owners.items(), key=lambda item: -item[1]))
