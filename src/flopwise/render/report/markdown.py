"""The report as Markdown for a comment on GitHub: the verdict, the findings, and the evidence folded away."""

import html
from collections.abc import Mapping
from urllib.parse import quote

from flopwise.errors import FlopwiseError
from flopwise.records.finding import Finding
from flopwise.render.charts import NOT_DRAWN, readable
from flopwise.render.report.evidence import Advice, Block, Picture, Report, ReportPart, Section, Shown
from flopwise.render.report.sections import sections, side_by_side
from flopwise.render.report.verdict import verdict
from flopwise.render.report.words import saving, short_command
from flopwise.render.table import Table, escaped, markdown
from flopwise.render.visible import LONGEST_LINE, visible

MOST_ROWS = 15  # of a table: a comment holds 65,536 characters


def markdown_report(report: Report, pictures: Mapping[str, str] | None = None) -> str:
    """The report; `pictures`, by name, are the addresses of pictures that were drawn of its charts."""
    several = len(report.parts) > 1
    parts = [_part(part, f"t{i + 1}-" if several else "", pictures or {}) for i, part in enumerate(report.parts)]
    if (beside := side_by_side(report.parts)) is not None:
        parts.insert(0, _section(beside, "", pictures or {}))
    made = f"\n<sub>made by {_code(short_command(report.command))}</sub>\n" if report.command else ""
    return "\n".join(parts) + made


def pictures_of(report: Report) -> dict[str, Picture]:
    """Every chart of the report by its name."""
    several = len(report.parts) > 1
    beside = side_by_side(report.parts)
    shared = {block.name: block for block in beside.blocks if isinstance(block, Picture)} if beside else {}
    return shared | {
        f"t{i + 1}-{block.name}" if several else block.name: block
        for i, part in enumerate(report.parts)
        for section in sections(part)
        for block in section.blocks
        if isinstance(block, Picture)
    }


def _part(part: ReportPart, prefix: str, pictures: Mapping[str, str]) -> str:
    head = f"## {_plain(part.name)}\n\n**{_plain(verdict(part))}**\n"
    told = (_section(section, prefix, pictures) for section in sections(part))
    return "\n".join([head, *(text for text in told if text)])


def _section(section: Section, prefix: str, pictures: Mapping[str, str]) -> str:
    """'' for one of pictures alone, where none are drawn."""
    blocks = [text for block in section.blocks if (text := _block(block, prefix, pictures))]
    if not blocks:
        return ""
    if section.key == "findings":
        return f"### {_plain(section.title)}\n\n" + "\n".join(blocks)
    opened = " open" if pictures else ""
    title = html.escape(visible(section.title, LONGEST_LINE))  # between tags Markdown's own escapes would be seen
    return f"<details{opened}><summary>{title}</summary>\n\n" + "\n".join(blocks) + "\n</details>\n"


def _block(block: Block, prefix: str, pictures: Mapping[str, str]) -> str:
    match block:
        case Picture():
            address = pictures.get(prefix + block.name)
            caption, how = _plain(block.caption), _plain(block.how)
            if address:
                return f"![{caption}]({quote(address)})\n\n{caption} ({how})\n"
            return f"{NOT_DRAWN} {caption}\n" if pictures or (block.doubtful and _fails(block)) else ""
        case Shown(folded=True):
            return ""
        case Shown():
            return markdown(_short(block.table, block.how, len(block.table.rows) if block.whole else MOST_ROWS))
        case Advice():
            return "\n".join(_finding(i + 1, finding) for i, finding in enumerate(block.findings))
        case _:
            return f"{_plain(block)}\n"


def _fails(picture: Picture) -> bool:
    """Whether the chart cannot be drawn of its rows; where the package is missing, nobody knows."""
    try:
        return readable(picture.draw) is None
    except FlopwiseError:
        return False


def _short(table: Table, how: str, most: int) -> Table:
    rest = len(table.rows) - most
    notes = (*((f"and {rest} row{'s' if rest > 1 else ''} more",) if rest > 0 else ()), *table.notes)
    title = f"{table.title} ({how})" if how else table.title
    return Table(title=title, columns=table.columns, rows=table.rows[:most], notes=notes)


def _finding(number: int, finding: Finding) -> str:
    saves = f" {saved} (predicted)." if (saved := saving(finding, first=number == 1)) else ""
    lines = [f"{number}. **{_plain(finding.title)}**{saves}", f"   - {_plain(finding.arithmetic)}"]
    lines += [f"   - {_plain(line)}" for line in finding.evidence]
    levers = " ".join(f"--{name} {value}" for name, value in finding.levers.items())
    lines += [f"   - lever: {_code(levers)}"] if levers else []
    if finding.code:
        fence = "`" * max(3, _longest_run(finding.code) + 1)
        lines += [
            "",
            f"   {fence}python",
            *(f"   {visible(line, LONGEST_LINE)}" for line in finding.code.splitlines()),
            f"   {fence}",
        ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return escaped(visible(text, LONGEST_LINE))


def _code(text: str) -> str:
    """A span of code that no backtick in it can end.

    >>> _code("a`b")
    '`` a`b ``'
    """
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{visible(text, LONGEST_LINE)}{pad}{fence}"


def _longest_run(text: str) -> int:
    """How many backticks stand together at most.

    >>> _longest_run("a``b`c")
    2
    """
    longest = now = 0
    for character in text:
        now = now + 1 if character == "`" else 0
        longest = max(longest, now)
    return longest
