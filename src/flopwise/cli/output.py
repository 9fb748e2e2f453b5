"""Data on stdout or in a file; the suffix decides the format."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from flopwise.errors import FlopwiseError, Interrupted, one_line
from flopwise.spec import fields

FORMATS = ("table", "json", "csv", "markdown")
_SUFFIXES = {".json": "json", ".csv": "csv", ".md": "markdown", ".txt": "table"}

PICTURE = "picture"
_T = TypeVar("_T")


def kept(measure: Callable[[], _T]) -> tuple[_T, bool]:
    """What a verb measured, and whether Ctrl-C stopped it: the part that it kept is shown then."""
    try:
        return measure(), False
    except Interrupted as stop:
        return stop.result, True


def chosen(form: str | None, output: str | None, draws: bool = False) -> str:
    """The format asked for, checked before any work is done; of a verb that draws, PICTURE for a picture's suffix."""
    if form is not None:
        fields.one_of("format", form, FORMATS)
    check_place(output)
    from flopwise.render.charts import SUFFIXES

    suffix, pictures = Path(output).suffix if output is not None else "", SUFFIXES if draws else ()
    if suffix in pictures:
        if form is not None:
            raise FlopwiseError(
                f"{output} is a picture, and --format {form} asks for none", "leave out --format, or -o another suffix"
            )
        return PICTURE
    if form is None and output is not None and suffix not in _SUFFIXES:
        known = ", ".join((*_SUFFIXES, *pictures))
        raise FlopwiseError(f"the suffix '{suffix}' of {output} names no format", f"use one of {known}, or --format")
    return form or (_SUFFIXES[Path(output).suffix] if output else "table")


def check_place(output: str | None) -> None:
    """Raise if the output has no folder, or would replace what the command reads: raw files are never written over."""
    if output is None:
        return
    target = Path(output).expanduser()
    if not target.resolve().parent.is_dir():
        raise FlopwiseError(
            f"cannot write {output}: there is no such folder", "make the folder first, or write elsewhere"
        )
    if target.is_dir():
        raise FlopwiseError(f"cannot write {output}: it is a folder", "name a file")
    if not target.exists():
        return
    if any(_same_file(target, given) for given in _given_files()):
        raise FlopwiseError(
            f"cannot write {output}: this command reads it, and it would be lost", "write to another name"
        )
    from flopwise.store.files import HEADER

    near = list(target.resolve().parents)[:2]  # a run's files lie in its folder or in one below it
    if run := next((folder for folder in near if (folder / HEADER).is_file()), None):
        raise FlopwiseError(
            f"cannot write {output}: it belongs to the run {run.name}, and would be lost", "write outside the run"
        )


def _given_files() -> Iterator[Path]:
    """Whatever the command line names that could be a file; which of its words are inputs is the verb's affair."""
    context = click.get_current_context(silent=True)
    for name, value in (context.params if context else {}).items():
        if name in ("output", "save"):  # where to write
            continue
        for word in value if isinstance(value, tuple) else (value,):
            if isinstance(word, str) and word:
                path = Path(word.removeprefix("hf:")).expanduser()
                yield from (path, path / "config.json")  # hf: takes the folder, too


def _same_file(target: Path, given: Path) -> bool:
    try:
        return given.is_file() and target.samefile(given)
    except (OSError, ValueError):  # no such file, or no name of a file at all
        return False


def said(line: str) -> None:
    """A line to the user, beside the data; names in it may come from outside."""
    click.echo(one_line(line, 1000), err=True)


def show(tables: list[Any], document: dict[str, Any], form: str, output: str | None) -> None:
    """Render and write; `tables` for people and spreadsheets, `document` for programs."""
    write_text(_rendered(tables, document, form, to_terminal=output is None), output)


def write_text(text: str, output: str | None) -> None:
    """To standard output, or whole into a file."""
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    from flopwise.store.files import write_output

    try:
        write_output(Path(output).expanduser(), text)
    except OSError as error:
        raise FlopwiseError(f"cannot write {output}: {error.strerror}", "choose another place") from None
    said(f"wrote {output}")


def _rendered(tables: list[Any], document: dict[str, Any], form: str, to_terminal: bool) -> str:
    from flopwise.render import table as t
    from flopwise.render import terminal
    from flopwise.render.json import json_text

    match form:
        case "json":
            return json_text(document)
        case "csv":
            return "\r\n".join(t.csv_text(table, titled=len(tables) > 1) for table in tables)
        case "markdown":
            return "\n".join(t.markdown(table) for table in tables)
        case _:
            from rich.console import Console

            console = Console() if to_terminal and sys.stdout is not None and sys.stdout.isatty() else None
            return "\n".join(terminal.text(table, console) for table in tables)
