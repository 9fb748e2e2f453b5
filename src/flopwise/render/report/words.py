"""Words that the page and the Markdown share, so that both say the same."""

import re
import shlex

from flopwise import units
from flopwise.records.finding import Finding

_TELLING = 0.01  # of a saving: a smaller difference between by itself and with the others goes unsaid
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST = 80


def slug(text: str) -> str:
    """A name as it may stand in an id, an address or a file's name: nothing in it ends an attribute or leaves a folder.

    >>> slug('x"><meta http-equiv=refresh>'), slug("../../etc"), slug("lab-warmup")
    ('x-meta-http-equiv-refresh-', '-etc', 'lab-warmup')
    """
    return _NOT_PLAIN.sub("-", text)[:_LONGEST]


def saving(finding: Finding, first: bool) -> str:
    """What a finding saves by itself; and, where that is another number, with the rest mended. '' where it saves nothing.

    It stands where its larger number puts it: a saving that others stand in the way of may be small by itself.

    >>> one = Finding(rule="r", title="t", arithmetic="", saving_ns=7.32e6, counted_ns=36e6)
    >>> saving(one, first=True)
    'Saves about 7.32 ms of a step by itself; about 36.0 ms once the others are mended, too'
    >>> saving(Finding(rule="r", title="t", arithmetic="", saving_ns=7e6, saving_bytes=2**30, counted_ns=0.0), first=False)
    'Saves about 7.00 ms of a step and 1.00 GiB of the peak; no time more once those above are mended'
    """
    by_itself = finding.saving_ns
    counted = by_itself if finding.counted_ns is None else finding.counted_ns
    differs = abs(counted - by_itself) > _TELLING * by_itself
    after = ""
    if differs and counted > by_itself:
        after = f"about {units.duration(counted)} once the others are mended, too"
    elif differs and not first:
        after = f"{f'about {units.duration(counted)}' if counted > 0 else 'no time more'} once those above are mended"
    time = f"{units.duration(by_itself)} of a step" if by_itself > 0 else ""
    memory = f"{units.size(finding.saving_bytes)} of the peak" if finding.saving_bytes > 0 else ""
    saved = " and ".join(words for words in (time, memory) if words)
    if not saved:
        return f"Saves {after}" if after else ""
    alone = " by itself" if differs and counted > by_itself else ""
    return f"Saves about {saved}{alone}" + (f"; {after}" if after else "")


def short_command(command: str) -> str:
    """A command without the folders in it: a page is passed on, and where files lie is nobody's business but their owner's.

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
