"""JSON for programs: a `schema` field, units in the names; documented in docs/reference/json.md."""

import math
from typing import Any

import msgspec


def document(kind: str, **content: Any) -> dict[str, Any]:
    """A document of one kind; the number after the slash grows when a field changes its meaning or goes.

    >>> document("runs", runs=[])
    {'schema': 'flopwise.runs/1', 'runs': []}
    """
    return {"schema": f"flopwise.{kind}/1", **content}


def json_text(content: dict[str, Any]) -> str:
    """Indented JSON; a number that is not finite becomes null, which JSON can hold."""
    return msgspec.json.format(msgspec.json.encode(_finite(msgspec.to_builtins(content))), indent=2).decode() + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
