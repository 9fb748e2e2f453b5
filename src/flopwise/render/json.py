"""JSON for programs: a `schema` field, units in the names; documented in docs/reference/json.md."""

from typing import Any

import msgspec

from flopwise.render.visible import visible_json


def document(kind: str, **content: Any) -> dict[str, Any]:
    """A document of one kind; the number after the slash grows when a field changes its meaning or goes.

    >>> document("runs", runs=[])
    {'schema': 'flopwise.runs/1', 'runs': []}
    """
    return {"schema": f"flopwise.{kind}/1", **content}


def picked(record: object, names: str) -> dict[str, Any]:
    """Some fields of a record.

    >>> picked(1j, "real imag")
    {'real': 0.0, 'imag': 1.0}
    """
    return {name: getattr(record, name) for name in names.split()}


def json_text(content: dict[str, Any]) -> str:
    """Indented JSON; a number that is not finite becomes null, which JSON can hold, and so does what is no text."""
    try:
        encoded = msgspec.json.encode(content)  # which writes null for a number that is not finite
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_writable(msgspec.to_builtins(content)))
    return visible_json(msgspec.json.format(encoded, indent=2).decode()) + "\n"


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_writable(key): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()  # a file's name may hold bytes that are no text
    return value
