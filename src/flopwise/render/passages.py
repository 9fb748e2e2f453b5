"""Texts as they are, one after the other, with a few remarks below: what a model said."""

import textwrap
from dataclasses import dataclass

from rich.text import Text

from flopwise.render.screen import WIDTH
from flopwise.render.visible import LONGEST_LINE, visible


@dataclass(frozen=True)
class Passages:
    """Each text with what it began with."""

    title: str
    texts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    script: bool = False  # lines to run: none is folded, and all else is a comment


def passage_lines(shown: Passages) -> list[Text]:
    """Line breaks are kept, longer lines folded; what else would steer a terminal is shown, not done."""
    if shown.script:
        typed = [line for _, text in shown.texts for line in text.split("\n")]
        remarks = [f"# {note}" for note in shown.notes]
        return [Text(visible(line)) for line in (f"# {shown.title}", *typed, *remarks)]
    lines = [Text(visible(shown.title, LONGEST_LINE), "bold")]
    for begun, text in shown.texts:
        lines.append(Text("─" * WIDTH, "dim"))
        for line in (begun + text).split("\n"):
            folded = textwrap.wrap(visible(line), WIDTH, replace_whitespace=False, drop_whitespace=False)
            lines += [Text(part.rstrip()) for part in folded or [""]]
    return [*lines, Text("─" * WIDTH, "dim"), *(Text(note, "dim") for note in shown.notes)]
