"""What a Kineto file says of its rank: `distributedInfo`, the host's name, and the time that its clock counts from."""

from collections.abc import Mapping
from typing import Any

import msgspec

from flopwise.trace.tables import NO_ID, Distributed

_LONGEST = 255
_MOST_GROUPS, _LARGEST = 10_000, 1 << 31


def distributed(metadata: Mapping[str, bytes]) -> Distributed:
    """
    >>> distributed({"distributedInfo": b'{"rank": 7, "world_size": 8, "backend": "nccl"}'}).rank
    7
    """
    found = _decoded(metadata.get("distributedInfo"))
    found = found if isinstance(found, dict) else {}
    host = _decoded(metadata.get("host_name"))
    backend = found.get("backend")
    return Distributed(
        rank=_number(found.get("rank"), NO_ID),
        world=_number(found.get("world_size"), 0),
        backend=backend[:_LONGEST] if isinstance(backend, str) else "",
        host=host[:_LONGEST] if isinstance(host, str) else "",
        groups=_groups(found.get("pg_config")),
    )


def base_ns(metadata: Mapping[str, bytes]) -> int:
    """What has to be added to the file's times; 0 where they count from the Unix epoch already."""
    base = _decoded(metadata.get("baseTimeNanoseconds"))
    return base if isinstance(base, int) and abs(base) < 1 << 62 else 0


def _groups(given: object) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for one in given[:_MOST_GROUPS] if isinstance(given, list) else ():
        name, ranks = (one.get("pg_name"), one.get("ranks")) if isinstance(one, dict) else (None, None)
        if isinstance(name, str) and isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            found[name[:_LONGEST]] = tuple(ranks)
    return found


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < _LARGEST else default


def _decoded(text: bytes | None) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
