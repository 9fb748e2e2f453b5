"""The course, item by item: the page is that of the data, commands print our figures, stored pages hold them."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from in_process import in_process

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def load():
    spec = importlib.util.spec_from_file_location("course_items", ROOT / "benchmarks" / "course_items.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["course_items"] = module  # msgspec looks its annotations up there
    spec.loader.exec_module(module)
    return module


MODULE = load()
ITEMS = [item for section in MODULE.sections() for item in section.item]
RUN = [item for item in ITEMS if item.command and not item.stored]
COMMANDS = {item.command: item.slow for item in RUN}


def flat(text):
    """Words with one space between them: columns and line breaks do not matter."""
    return " ".join(text.split())


def missing(items, text):
    return [words for item in items for words in item.evidence if flat(words) not in flat(text)]


def test_the_page_is_made_from_the_items():
    assert MODULE.PAGE.read_text(encoding="utf-8") == MODULE.page(MODULE.sections()), "make pages"


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.what)
def test_an_item_is_whole(item):
    """Its verdict is known, it has a figure or says why not, and each number of ours is in what was seen."""
    assert item.verdict in MODULE.VERDICTS
    assert bool(item.ours) == bool(item.command) == (item.verdict != "not ours")
    assert set(NUMBER.findall(item.ours)) <= set(NUMBER.findall(" ".join(item.evidence)))
    assert item.stored or not item.command or item.command.startswith("flopwise ")


@pytest.mark.parametrize("stored", sorted({item.stored for item in ITEMS if item.stored}))
def test_stored_pages_hold_our_figures(stored):
    text = (ROOT / stored.partition("#")[0]).read_text(encoding="utf-8")
    assert missing([item for item in ITEMS if item.stored == stored], text) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=pytest.mark.slow if slow else ()) for line, slow in COMMANDS.items()]
)
def test_commands_print_our_figures(command, tmp_path):
    ended = in_process(*shlex.split(command)[1:], cwd=ROOT, FLOPWISE_RUNS=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert missing([item for item in RUN if item.command == command], ended.stdout) == []


def test_a_wrong_figure_is_seen():
    item = MODULE.Item(what="", verdict="agree", why="", ours="143 days", command="flopwise account")
    assert missing([item], "takes 143.9\ndays") == ["143 days"]
    assert missing([item], "takes 143\ndays") == []
