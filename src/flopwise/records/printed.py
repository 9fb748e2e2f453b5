"""How a result shows itself in Python: `print` and notebooks as the command line does, `repr` in one line."""

from collections.abc import Callable

from flopwise.errors import one_line

Renderer = Callable[[object], str]
_LONGEST = 100
# How each form is made. The package sets them, as rendering lies to the right of every result.
_renderers: dict[str, Renderer] = {}


def print_by(text: Renderer, html: Renderer) -> None:
    """Say what makes the text and the HTML of a result."""
    _renderers.update(text=text, html=html)


class Printed:
    """A result of a verb."""

    __slots__ = ()

    def __str__(self) -> str:
        return _renderers["text"](self).rstrip("\n")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {one_line(self.headline(), _LONGEST)}>"

    def _repr_html_(self) -> str:
        return _renderers["html"](self)

    def headline(self) -> str:
        """What it is of, in a few words."""
        raise NotImplementedError
