"""Vega's JavaScript for pages. To bundle it takes seconds, so it is kept in the user's cache folder."""

import hashlib
import importlib.metadata
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from flopwise.errors import FlopwiseError

HINT = "pip install 'flopwise[charts]'"
_SETS = "window.vegaEmbed = vegaEmbed;"


@cache
def vega_javascript() -> str:
    """Vega, Vega-Lite and vega-embed as one script that sets `window.vegaEmbed`; nothing in it ends a script element."""
    try:
        import vl_convert
    except ImportError:
        raise FlopwiseError("charts need the packages altair and vl-convert-python", HINT) from None
    place = kept_at(importlib.metadata.version("vl-convert-python"))
    if (kept := _read(place)) is not None:
        return kept
    script = str(vl_convert.javascript_bundle(_SETS))
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    _keep(place, script)
    return script


def kept_at(version: str) -> Path:
    """Where the script of this version of vl-convert is kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flopwise"
    return folder / f"vega-{version}.js"


def _read(place: Path) -> str | None:
    """What was kept, if it is ours and whole: its first line is the hash of the rest."""
    try:
        if hasattr(os, "getuid") and place.stat().st_uid != os.getuid():
            return None
        told, _, script = place.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return script if told == _first_line(script) else None


def _keep(place: Path, script: str) -> None:
    """Whole or not at all; a folder that cannot be written costs the time again, nothing else."""
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"{_first_line(script)}\n{script}", encoding="utf-8", newline="\n")
        partial.replace(place)
    except OSError:
        with suppress(OSError):
            partial.unlink()


def _first_line(script: str) -> str:
    return f"// sha256 {hashlib.sha256(script.encode()).hexdigest()}"
