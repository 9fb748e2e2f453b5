"""A remark about a result: `key` is for code, `text` for people."""

import msgspec


class Note(msgspec.Struct, frozen=True):
    """JSON shows the texts alone, as `notes`; the keys stand in `note_keys`, in the same order."""

    key: str
    text: str


def counted(**counts: tuple[int, str]) -> tuple[Note, ...]:
    """Notes about what occurred: `key=(number, "what happened to them")`; none for what did not occur.

    >>> counted(dropped=(1200, "events have no time: dropped"), open=(0, "ranges have no end"))
    (Note(key='dropped', text='1,200 events have no time: dropped'),)
    """
    return tuple(Note(key, f"{count:,} {text}") for key, (count, text) in counts.items() if count)
