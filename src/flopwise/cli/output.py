"""Data on stdout or in a file; the suffix decides the format."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from flopwise.errors import Failed, FlopwiseError, Interrupted, one_line
from flopwise.render import one_screen, terminal
from flopwise.render.charts import SUFFIXES as PICTURES
from flopwise.render.json import json_text
from flopwise.render.one_screen import Shown
from flopwise.render.screen import WIDTH
from flopwise.render.table import View, csv_text, markdown
from flopwise.spec import fields
from flopwise.store.files import HEADER, write_output

FORMATS = ("table", "json", "csv", "markdown")
PICTURE, PAGES = "picture", (".html",)
format_option = click.option(
    "--format", "form", metavar="|".join(FORMATS), help="By default the suffix of -o, or table."
)
full_option = click.option("--full", is_flag=True, help="All tables, not one screen.")
output_option = click.option("-o", "--output", metavar="FILE", help="Write to a file instead of standard output.")
_SUFFIXES = {".json": "json", ".csv": "csv", ".md": "markdown", ".txt": "table"}

_T = TypeVar("_T")


def kept(measure: Callable[[], _T]) -> tuple[_T, bool]:
    """What a verb measured, and whether Ctrl-C stopped it: what was kept is shown then, and of a step that failed."""
    try:
        return measure(), False
    except Failed as failed:
        return failed.result, False
    except Interrupted as stop:
        return stop.result, True


@dataclass(frozen=True)
class Answer:
    """What a verb shows, its exit code, and how to write its picture, where one is asked for."""

    view: View | Callable[[], View]  # all tables, made where they are asked for
    code: Callable[[], int] | None = None  # asked for when all is shown; it may raise what went wrong
    write: Callable[[Path], object] | None = None
    table_too: bool = False  # with the picture
    screen: Callable[[], Shown | None] | None = None  # the answer on one screen, unless --full is asked for
    typed: bool = False  # its screen is a script: also in a text file, and with --full
    narrow: bool = False  # its tables are the answer: in the width of a screen


def answers(
    draws: bool = False, pages: bool | Sequence[str] = False, screens: bool = False
) -> Callable[[Callable[..., Answer]], Callable[..., int]]:
    """The options --format and -o for a verb, and what they ask for; one that draws is told whether a picture is wanted.

    `pages`: it writes a page, as `report` does, or files of these suffixes. `screens`: it answers on one screen, and --full shows
    its tables.
    """

    written = PICTURES if draws else (PAGES if pages is True else pages or ())

    def decorated(verb: Callable[..., Answer]) -> Callable[..., int]:
        @format_option
        @output_option
        @wraps(verb)
        def command(form: str | None, output: str | None, full: bool = False, **given: Any) -> int:
            form = chosen_format(form, output, written)
            answer = verb(**given, **({"picture": form == PICTURE} if draws else {}))
            if form != PICTURE or output is None:
                show_answer(answer, form, output, full)
            elif answer.table_too or answer.write is None:
                show_answer(answer, "table", None, full)
            if form == PICTURE and output is not None and answer.write is not None:
                answer.write(Path(output).expanduser())
                notify(f"wrote {output}")
            return answer.code() if answer.code is not None else 0

        return full_option(command) if screens else command

    return decorated


def chosen_format(form: str | None, output: str | None, pictures: Sequence[str] = ()) -> str:
    """The format asked for, checked before any work is done; PICTURE for a suffix of what the verb draws."""
    if form is not None:
        fields.one_of("format", form, FORMATS)
    check_place(output)
    suffix = Path(output).suffix if output is not None else ""
    if suffix in pictures and form is not None:
        message = f"{output} is a {'page' if suffix == '.html' else 'picture'}, and --format {form} asks for none"
        raise FlopwiseError(message, "leave out --format, or -o another suffix")
    if suffix in pictures:
        return PICTURE
    if form is None and output is not None and suffix not in _SUFFIXES:
        known = ", ".join((*_SUFFIXES, *pictures))
        raise FlopwiseError(f"the suffix '{suffix}' of {output} names no format", f"use one of {known}, or --format")
    return form or (_SUFFIXES[suffix] if output else "table")


def check_place(output: str | None) -> None:
    """Raise if the output has no folder, or would replace what the command reads: raw files are never written over."""
    if output is None:
        return
    target = Path(output).expanduser()
    why, hint = _refusal(target)
    if why:
        raise FlopwiseError(f"cannot write {output}: {why}", hint)


def _refusal(target: Path) -> tuple[str, str]:
    if not target.resolve().parent.is_dir():
        return "there is no such folder", "make the folder first, or write elsewhere"
    if target.is_dir():
        return "it is a folder", "name a file"
    if not target.exists():
        return "", ""
    if any(_same_file(target, given) for given in _given_files()):
        return "this command reads it, and it would be lost", "write to another name"
    near = list(target.resolve().parents)[:2]  # a run's files lie in its folder or in one below it
    if run := next((folder for folder in near if (folder / HEADER).is_file()), None):
        return f"it belongs to the run {run.name}, and would be lost", "write outside the run"
    return "", ""


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
                yield Path(word.removeprefix("py:").rpartition(":")[0]).expanduser()  # file.py:factory


def _same_file(target: Path, given: Path) -> bool:
    try:
        return given.is_file() and target.samefile(given)
    except (OSError, ValueError):  # no such file, or not a file's name at all
        return False


def notify(line: str) -> None:
    """A line to the user on stderr; names in it may come from outside."""
    click.echo(one_line(line, 1000), err=True)


def show_answer(answer: Answer, form: str, output: str | None, full: bool = False) -> None:
    """On one screen where nothing else is asked for; files have everything."""
    short = answer.typed or (output is None and not full)
    screen = answer.screen() if answer.screen is not None and form == "table" and short else None
    if screen is None:
        narrow = answer.narrow and not full
        show(answer.view() if callable(answer.view) else answer.view, form, output, narrow=narrow)
    else:
        write_text(one_screen.text(screen, console() if output is None else None), output)


def console() -> Console | None:
    """The terminal; None where standard output is none."""
    return Console() if sys.stdout is not None and sys.stdout.isatty() else None


def show(view: View, form: str, output: str | None, *, narrow: bool = False) -> None:
    """Render and write; `narrow`: not wider than a screen, on standard output."""
    if form == "csv":  # it has rows alone
        for line in view.warnings:
            notify(f"damaged: {line}")
    width = WIDTH if narrow and output is None else terminal.PLAIN_WIDTH
    write_text(_rendered(view, form, console() if output is None else None, width), output)


def write_text(text: str, output: str | None) -> None:
    """To standard output, or whole into a file."""
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    try:
        write_output(Path(output).expanduser(), text)
    except OSError as error:
        raise FlopwiseError(f"cannot write {output}: {error.strerror}", "choose another place") from None
    notify(f"wrote {output}")


def _rendered(view: View, form: str, there: Console | None, width: int) -> str:
    match form:
        case "json":
            return json_text(view.document)
        case "csv":
            return "\r\n".join(csv_text(table, titled=len(view.tables) > 1) for table in view.tables)
        case "markdown":
            return "\n".join(map(markdown, view.tables))
        case _:
            return terminal.texts(view.tables, there, width)
