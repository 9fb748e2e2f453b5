"""The words that the page and the Markdown share: of several points, what a finding saves, the command."""

import re
import shlex
from collections.abc import Sequence

from flopwise import units
from flopwise.analysis.clocks import step_level_ns
from flopwise.records.finding import Finding
from flopwise.records.run import Point
from flopwise.render.axes import labels_of

_NOTICEABLE = 0.01  # of a saving: a smaller difference between alone and with other changes is not mentioned


def of_several(points: Sequence[Point], failed: int) -> str:
    """From the fastest to the slowest."""
    count = f"{len(points)} points measured" + (f", {failed} failed" if failed else "")
    if not points:
        return f"{count}."
    times = sorted(zip((step_level_ns(point) for point in points), labels_of(points), strict=True))
    (low, fastest), (high, slowest) = times[0], times[-1]
    return f"{count}: from {units.duration(low)} ({fastest}) to {units.duration(high)} ({slowest}) a step."


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
