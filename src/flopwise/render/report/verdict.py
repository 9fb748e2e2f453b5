"""The words that the page and the Markdown share: the verdict, what a finding saves, the command."""

import re
import shlex

from flopwise import units
from flopwise.analysis.clocks import summarise
from flopwise.records.comparison import INCONCLUSIVE
from flopwise.records.finding import Finding
from flopwise.records.run import OK
from flopwise.records.tuning import Tuning
from flopwise.records.waterfall import IDLE_INPUT, IDLE_LAUNCH, IDLE_OTHER, IDLE_SYNCHRONISATION, Waterfall
from flopwise.render.actions import what_to_do
from flopwise.render.lab_view import summary
from flopwise.render.memory_view import subject
from flopwise.render.report.evidence import ReportPart
from flopwise.snapshot.answers import MemoryReport

_NOTICEABLE = 0.01  # of a saving: a smaller difference between alone and with other changes is not mentioned
WORTH_SAYING = 0.05  # of the step: shorter idle time is not mentioned
_NOTHING_LEFT = "nothing left to try"
_IDLE = {
    IDLE_LAUNCH: "the GPU waits for the CPU",
    IDLE_SYNCHRONISATION: "the GPU waits for the CPU",
    IDLE_INPUT: "the GPU waits for data",
    IDLE_OTHER: "the GPU is idle",
}


def verdict(part: ReportPart) -> str:
    """The most important thing that is known of this target."""
    if part.tuning is not None:
        return _of_tuning(part.tuning)
    if part.lab is not None:
        return f"{summary(part.lab)}."
    if part.waterfall is not None:
        return _of_waterfall(part.waterfall, part.findings)
    if (e := part.explanation) is not None:
        return _joined(f"A step takes {units.duration(e.step_ns)}; {e.verdict}.", _advice(part.findings, e.step_ns))
    if part.memory is not None:
        return _of_memory(part.memory)
    return _of_pairs(part) if part.pairs else _of_run(part)


def _of_tuning(tuning: Tuning) -> str:
    before, after, ratio = tuning.first_ns, tuning.last_ns, tuning.times_faster
    ended = tuning.ended.stopped if tuning.ended is not None else "stopped before its end"
    left = "" if ended == _NOTHING_LEFT else f" Levers are left to try: {ended}."
    if not tuning.kept:
        unclear = sum(a.comparison is not None and a.comparison.verdict == INCONCLUSIVE for a in tuning.attempts)
        outcome = "nothing that was tried was kept" if tuning.attempts else "nothing was tried"
        of = f"; {unclear} of {len(tuning.attempts)} levers could not be judged" if unclear else ""
        return f"A step takes {units.duration(before)}, and {outcome}{of}.{left}"
    faster = f", {ratio:.2f} times as fast" if ratio > 1 else ""
    times = f"{units.duration(before)} to {units.duration(after)}"
    return f"A step went from {times}{faster}, measured.{left}"


def _of_waterfall(found: Waterfall, findings: tuple[Finding, ...]) -> str:
    first = f"A step takes {units.duration(found.step_ns)}."
    if found.mfu is not None:
        peak = f" (its peak in {found.precision})" if found.precision not in ("", "bf16", "fp16") else ""
        first = f"This step reaches {units.percent(found.mfu, 0)} of the chip{peak}."
    waits: dict[str, float] = {}
    for part in found.parts:
        if (what := _IDLE.get(part.name)) is not None:
            waits[what] = waits.get(what, 0.0) + part.share
    most = max(waits, key=lambda what: waits[what], default="")
    share, least = (
        _surely_idle(found, waits.get(most, 0.0)),
        "" if found.untraced is None or found.untraced.measured else "At least ",
    )
    idle = f"{least}{units.percent(share, 0)} of the time {most}." if share >= WORTH_SAYING else ""
    return _joined(first, _estimated(found), idle, _advice(findings, found.step_ns))


def _estimated(found: Waterfall) -> str:
    step = found.untraced
    if step is None or step.measured:
        return ""
    low, high = units.duration(step.low_ns), units.duration(step.high_ns)
    return f"Without the profiler it takes about {units.duration(step.ns)}, an estimate: {low} to {high}."


def _surely_idle(found: Waterfall, share: float) -> float:
    """Of the step at the optimistic end, where it is an estimate: all that it is shorter by is idle time."""
    step = found.untraced
    if step is None or step.measured:
        return share
    return max(0.0, share * step.ns - (step.ns - step.low_ns)) / step.low_ns


def _advice(findings: tuple[Finding, ...], step_ns: float) -> str:
    """What the best finding would change, if it saves time."""
    best = next((f for f in findings if f.saving_ns > 0), None)
    if best is None:
        return ""
    after = max(0.0, step_ns - best.saving_ns)
    return f"{what_to_do(best)}: {units.duration(step_ns)} → about {units.duration(after)}, predicted."


def _of_memory(found: MemoryReport) -> str:
    if not found.devices:
        return f"{subject(found)}: {found.status}; {found.reason}."
    peak = found.devices[0].peak
    owner = max(peak.owners, key=lambda name: peak.owners[name], default="")
    share = peak.owners.get(owner, 0) / max(peak.allocated_bytes, 1)
    most = f" {units.percent(share, 0)} of it is {owner}." if owner else ""
    return f"{subject(found)} holds {units.size(peak.allocated_bytes)} at its peak ({found.obtained}).{most}"


def _of_pairs(part: ReportPart) -> str:
    a, b, compared = part.pairs[0]
    before, after = (summarise(point)[0].wall.median for point in (a, b))
    levers = b.trial.workload.recipe.changed()
    changed = " ".join(f"{lever}={value}" for lever, value in levers.items()) or b.trial.workload.label()
    times = f"{units.duration(before)} → {units.duration(after)}"
    return f"{a.trial.workload.label()}: with {changed} a step is {compared.verdict}, {times}, measured against each other."


def _of_run(part: ReportPart) -> str:
    if part.run is None:
        return part.name
    points = part.points
    if len(points) == 1:
        step = summarise(points[0])[0]
        idle = (step.gpu_idle_share or 0.0) if step.gpu_exact else 0.0
        waits = f"; the GPU is idle {units.percent(idle, 0)} of it" if idle >= WORTH_SAYING else ""
        return f"A step of {points[0].trial.workload.label()} takes {units.duration(step.wall.median)}{waits}."
    failed = sum(point.status != OK for point in part.run.points)
    count = f"{len(points)} points measured" + (f", {failed} failed" if failed else "")
    if not points:
        return f"{count}."
    times = sorted((summarise(point)[0].wall.median, point.trial.workload.label()) for point in points)
    (low, fastest), (high, slowest) = times[0], times[-1]
    return f"{count}: from {units.duration(low)} ({fastest}) to {units.duration(high)} ({slowest}) a step."


def _joined(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def saving(finding: Finding, first: bool) -> str:
    """What a finding saves alone; and, where that is another number, with other changes. '' where it saves nothing.

    >>> one = Finding(rule="r", title="t", arithmetic="", saving_ns=7.32e6, counted_ns=36e6)
    >>> saving(one, first=True)
    'Saves about 7.32 ms of a step alone; about 36.0 ms together with the other changes'
    >>> saving(Finding(rule="r", title="t", arithmetic="", saving_ns=7e6, saving_bytes=2**30, counted_ns=0.0), first=False)
    'Saves about 7.00 ms of a step and 1.00 GiB of the peak; no more time after the changes above'
    """
    alone = finding.saving_ns
    counted = alone if finding.counted_ns is None else finding.counted_ns
    time = f"{units.duration(alone)} of a step" if alone > 0 else ""
    memory = f"{units.size(finding.saving_bytes)} of the peak" if finding.saving_bytes > 0 else ""
    saved = " and ".join(words for words in (time, memory) if words)
    together = _together(alone, counted, first)
    if not saved:
        return f"Saves {together}" if together else ""
    only = " alone" if together and counted > alone else ""
    return f"Saves about {saved}{only}" + (f"; {together}" if together else "")


def _together(alone: float, counted: float, first: bool) -> str:
    """What it saves with other changes, where that differs."""
    if abs(counted - alone) <= _NOTICEABLE * alone:
        return ""
    if counted > alone:
        return f"about {units.duration(counted)} together with the other changes"
    if first:
        return ""
    return f"{f'about {units.duration(counted)}' if counted > 0 else 'no more time'} after the changes above"


def short_command(command: str) -> str:
    """A command without the folders in it: a page is passed on, and where files lie is private.

    >>> short_command("flopwise report /home/me/runs/a --runs=~/r/all -o 'my page.html'")
    "flopwise report a --runs=all -o 'my page.html'"
    >>> short_command("flopwise bench hf:Qwen/Qwen3-0.6B"), short_command("flopwise tune py:work/step.py:make")
    ('flopwise bench hf:Qwen/Qwen3-0.6B', 'flopwise tune py:step.py:make')
    """
    try:
        words = shlex.split(command)
    except ValueError:  # not a command line of ours
        words = command.split()
    return shlex.join(_without_folders(word) for word in words)


def _without_folders(word: str) -> str:
    if re.match(r"hf:[^/~.]", word):  # an owner and a model, no folder
        return word
    return "".join(piece.rstrip("/").rpartition("/")[2] for piece in re.split(r"([=:,])", word))
