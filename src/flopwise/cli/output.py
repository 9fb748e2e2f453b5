"""Data on stdout or in a file; the suffix decides the format."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from flopwise.errors import FlopwiseError
from flopwise.spec import fields

FORMATS = ("table", "json", "csv", "markdown")
_SUFFIXES = {".json": "json", ".csv": "csv", ".md": "markdown", ".txt": "table"}


def chosen(form: str | None, output: str | None) -> str:
    """The format asked for, checked before any work is done."""
    if form is not None:
        fields.one_of("format", form, FORMATS)
    if output is not None and not Path(output).expanduser().resolve().parent.is_dir():
        raise FlopwiseError(
            f"cannot write {output}: there is no such folder", "make the folder first, or write elsewhere"
        )
    if form is None and output is not None and (suffix := Path(output).suffix) not in _SUFFIXES:
        raise FlopwiseError(
            f"the suffix '{suffix}' of {output} names no format", f"use one of {', '.join(_SUFFIXES)}, or --format"
        )
    return form or (_SUFFIXES[Path(output).suffix] if output else "table")


def show(tables: list[Any], document: dict[str, Any], form: str, output: str | None) -> None:
    """Render and write; `tables` for people and spreadsheets, `document` for programs."""
    text = _rendered(tables, document, form, to_terminal=output is None)
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    target = Path(output).expanduser()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)  # whole or not at all
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise FlopwiseError(f"cannot write {output}: {error.strerror}", "choose another place with -o") from None
    click.echo(f"wrote {output}", err=True)


def _rendered(tables: list[Any], document: dict[str, Any], form: str, to_terminal: bool) -> str:
    from flopwise.render import table as t
    from flopwise.render import terminal
    from flopwise.render.json import json_text

    match form:
        case "json":
            return json_text(document)
        case "csv":
            return "\r\n".join(t.csv_text(table) for table in tables)
        case "markdown":
            return "\n".join(t.markdown(table) for table in tables)
        case _:
            from rich.console import Console

            console = Console() if to_terminal and sys.stdout is not None and sys.stdout.isatty() else None
            return "\n".join(terminal.text(table, console) for table in tables)
