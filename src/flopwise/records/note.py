"""A remark about a result: `key` is for code, `text` for people."""

import msgspec

from flopwise import units


class Note(msgspec.Struct, frozen=True):
    """JSON shows the texts alone, as `notes`; the keys stand in `note_keys`, in the same order."""

    key: str
    text: str


def counted(**counts: tuple[int, str, str]) -> tuple[Note, ...]:
    """Notes about what occurred: `key=(number, "thing", "and what of it")`; none for what did not occur.

    >>> counted(dropped=(1200, "event", "without a time: dropped"), open=(0, "range", "without an end"))
    (Note(key='dropped', text='1,200 events without a time: dropped'),)
    """
    return tuple(Note(key, f"{units.several(n, what)} {text}") for key, (n, what, text) in counts.items() if n)
