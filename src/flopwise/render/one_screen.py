"""What a verb answers on one screen, as text: one step, or a line for each of several."""

import io

from rich.console import Console

from flopwise.render.listing import Listing, listing_lines
from flopwise.render.passages import Passages, passage_lines
from flopwise.render.screen import WIDTH, Screen, screen_lines

Shown = Screen | Listing | Passages


def text(shown: Shown, console: Console | None = None) -> str:
    """The screen as text; coloured when `console` is a terminal that has colour."""
    if isinstance(shown, Passages):
        lines = passage_lines(shown)
    else:
        lines = listing_lines(shown) if isinstance(shown, Listing) else screen_lines(shown)
    if console is None or not console.is_terminal or console.is_dumb_terminal:
        return "".join(f"{line.plain}\n" for line in lines)
    out = io.StringIO()
    target = Console(file=out, width=WIDTH, force_terminal=True, no_color=console.no_color)
    for line in lines:
        target.print(line, no_wrap=True, overflow="ignore", crop=False)
    return out.getvalue()
