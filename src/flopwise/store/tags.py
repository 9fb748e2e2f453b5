"""A run's tags: a small file of its own."""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from flopwise.atomic import write_atomically
from flopwise.store import files
from flopwise.store.rows import UNREADABLE
from flopwise.store.seals import CHANGED, alone_is_sound, sealed

TAG = re.compile(r"(?!last|\.{1,2}$)[A-Za-z0-9._-]{1,64}")
_MAX_BYTES = 2**20


class _Tags(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = 1
    tags: tuple[str, ...] = ()


class ReadTags(NamedTuple):
    """The tags, and a line where they cannot be trusted: then there are none."""

    tags: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def read_tags(path: Path) -> ReadTags:
    """The tags of the run at `path`."""
    try:
        text = files.read_limited(path / files.TAGS, _MAX_BYTES)
        if alone_is_sound(text):
            found = msgspec.json.decode(text, type=_Tags).tags
            return ReadTags(tuple(tag for tag in found if TAG.fullmatch(tag)))
    except FileNotFoundError:
        return ReadTags(())
    except (OSError, *UNREADABLE):
        pass
    return ReadTags((), (f"{files.TAGS} {CHANGED}",))


def write_tags(path: Path, tags: tuple[str, ...]) -> None:
    """Replace a run's tags."""
    with files.explain_errors("write the tags of", path):
        write_atomically(path / files.TAGS, sealed(msgspec.json.encode(_Tags(tags=tags)))[0])
