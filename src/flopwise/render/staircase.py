"""A tuning as a staircase of text: the step's time after each lever that was kept."""

from flopwise import units
from flopwise.records.tuning import Attempt, Tuning
from flopwise.render.actions import action

_NAME, _TIME, _BAR = 36, 9, 30


def staircase(tuning: Tuning, most: int = 8) -> list[str]:
    """A line for each step of it, at most so many: of the levers kept, those that saved least are one line.

    >>> from flopwise.api.demo import TUNING
    >>> from flopwise.store.tuning import read_tuning
    >>> print(*staircase(read_tuning(TUNING), 4), sep=chr(10))
      as written                             62.7 ms  ██████████████████████████████
      Capture it in a CUDA graph             57.8 ms  ███████████████████████████▋
      Compute in bf16                        22.9 ms  ██████████▉
      9 more                                 5.00 ms  ██▍
    """
    first = tuning.first_ns
    shown, rest = tuning.kept[: most - 2], tuning.kept[most - 2 :]
    steps = [("as written", first), *((_name(one), one.after_ns or first) for one in shown)]
    if rest:
        steps.append((f"{len(rest)} more" if len(rest) > 1 else _name(rest[0]), tuning.last_ns))
    return [
        f"  {name[:_NAME]:<{_NAME}} {units.duration(ns):>{_TIME}}  {_bar(ns / first if first else 0.0)}".rstrip()
        for name, ns in steps
    ]


def _name(one: Attempt) -> str:
    return action(one.lever, one.value)


def _bar(share: float) -> str:
    """Eighths of a column."""
    eighths = round(8 * _BAR * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
