"""The page of the course's items, from course_items.toml. No GPU.

python benchmarks/course_items.py     # writes docs/appendix/course-items.md
"""

import os
import tomllib
from collections import Counter
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "appendix" / "course-items.md"
VERDICTS = {
    "agree": "we agree",
    "differ": "we differ",
    "wrong": "theirs is wrong",
    "not ours": "not ours to answer",
    "missing": "missing here",
}
HEAD = """# The course, item by item

A course on LLM systems came as three documents: a lecture, a student's write-up and the output of a report generator. Below is
every table, question, figure and claim in them, from top to bottom: {counts}.

A figure with a link was measured on an H200 and is stored there. All others are printed by their command on any machine; a test
runs them. Theirs are from other GPUs, so times differ; what the figures are said to mean is judged. Longer answers:
[the lab](lab.md), [the tables](course-tables.md), [the Nsight report](course-report.md).

Left out: the tokenizer (BPE's counts and merges) and training on several GPUs, which flopwise does not have yet; dates and
assignments.

<!-- measured: course-items -->
"""
COLUMNS = "| | item | theirs | ours | who is right, and why | command |\n|---|---|---|---|---|---|"


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the course asks, computes or claims."""

    what: str
    verdict: str
    why: str
    theirs: str = ""
    ours: str = ""
    command: str = ""
    seen: list[str] = []  # where `ours` comes from, word by word
    stored: str = ""
    slow: bool = False

    @property
    def evidence(self) -> list[str]:
        return self.seen or ([self.ours] if self.ours else [])


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one of the documents."""

    title: str
    item: list[Item]


def sections() -> list[Section]:
    """All items, in the documents' order."""
    text = (ROOT / "benchmarks" / "course_items.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["section"], list[Section], strict=True)


def row(number: int, item: Item) -> str:
    """An item as a row of its table."""
    ours = item.ours or "–"
    if item.stored:
        name, _, anchor = item.stored.partition("#")
        place = os.path.relpath(ROOT / name, PAGE.parent).replace(os.sep, "/")
        ours = f"[{ours}]({place}{'#' + anchor if anchor else ''})"
    verdict = f"**{VERDICTS[item.verdict]}**. {item.why}"
    command = f"`{item.command}`" if item.command else "–"
    return f"| {number} | {item.what} | {item.theirs or '–'} | {ours} | {verdict} | {command} |"


def page(parts: list[Section]) -> str:
    """The whole page."""
    counts = Counter(item.verdict for part in parts for item in part.item)
    total = f"{counts.total()} items; " + ", ".join(f"{words} {counts[key]}" for key, words in VERDICTS.items())
    lines, number = [HEAD.format(counts=total)], 0
    for part in parts:
        lines.append(f"## {part.title}\n\n{COLUMNS}")
        for item in part.item:
            number += 1
            lines.append(row(number, item))
        lines.append("")
    return "\n".join([*lines, "<!-- end -->"]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(sections()), encoding="utf-8")
