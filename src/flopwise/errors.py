"""What a user sees instead of a traceback."""

from typing import Any


class FlopwiseError(Exception):
    """Something a user can act on: what is wrong, in one line, and a hint.

    >>> str(FlopwiseError("batch = 0 is not allowed", "use a whole number from 1"))
    'batch = 0 is not allowed'
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(one_line(message))
        self.message = one_line(message)
        self.hint = one_line(hint)
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # below the message of a traceback


class Unsupported(FlopwiseError):
    """The workload is well formed, but this machine or this combination cannot run it: a row, not the end of a sweep.

    `levers`: those that are to blame, where it is known.
    """

    def __init__(self, message: str, hint: str = "", levers: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.levers = levers


class Damaged(FlopwiseError):
    """Rows of a run are lost, and without them nothing can be judged: as inconclusive as a verdict can be."""

    exit_code = 3


class WrongResult(FlopwiseError):
    """An implementation computes something else than its reference: it has no time worth telling."""


class Failed(FlopwiseError):
    """A step could not be measured. What is known of it is stored, and is `result`."""

    def __init__(self, message: str, hint: str, result: Any) -> None:
        super().__init__(message, hint)
        self.result = result


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while something was measured: what was measured until then is stored, and is `result`."""

    def __init__(self, result: Any) -> None:
        super().__init__("interrupted: what was measured is kept")
        self.result = result


def one_line(text: str, limit: int = 400) -> str:
    """Fold any text into one printable line; control characters from outside never reach a terminal.

    >>> one_line("two\\nlines\\x1b[31m")
    'two lines [31m'
    """
    folded = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return folded if len(folded) <= limit else folded[: limit - 1] + "…"
