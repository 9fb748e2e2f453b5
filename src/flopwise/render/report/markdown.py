"""The report as Markdown for a comment on GitHub: the verdict, the findings, and the evidence folded away."""

import html
import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from flopwise.errors import FlopwiseError
from flopwise.records.finding import Finding
from flopwise.records.table import Table
from flopwise.render.charts import NOT_DRAWN, readable
from flopwise.render.findings_view import options
from flopwise.render.report.evidence import (
    Advice,
    Block,
    ChartBlock,
    CodeBlock,
    Overview,
    Report,
    ReportPart,
    Section,
    TableBlock,
)
from flopwise.render.report.overview import overview
from flopwise.render.report.sections import sections, side_by_side
from flopwise.render.report.verdict import saving, short_command
from flopwise.render.table import escaped, inert, markdown
from flopwise.render.visible import LONGEST_LINE, visible

_LEADING = re.compile(r"^[#>+=-]")  # what makes a heading, a quotation or a list of a paragraph
MOST_ROWS = 15  # of a table: a comment holds 65,536 characters


def markdown_report(report: Report, pictures: Mapping[str, str] | None = None) -> str:
    """The report; `pictures` are the addresses of its charts as files, by their keys."""
    parts = [_part(part, prefix, pictures) for part, prefix in zip(report.parts, report.prefixes(), strict=True)]
    if (together := side_by_side(report.parts)) is not None:
        parts.insert(0, _section(together, "", pictures))
    made = f"\n<sub>made by {_code(short_command(report.command))}</sub>\n" if report.command else ""
    return "\n".join(parts) + made


def pictures_of(report: Report) -> dict[str, ChartBlock]:
    """Every chart of the report by its key."""
    together = side_by_side(report.parts)
    blocks: list[tuple[str, Block | None]] = [("", block) for block in together.blocks] if together else []
    for part, prefix in zip(report.parts, report.prefixes(), strict=True):
        blocks.append((prefix, overview(part).picture))
        blocks += [(prefix, block) for section in sections(part) for block in section.blocks]
    return {prefix + block.key: block for prefix, block in blocks if isinstance(block, ChartBlock)}


def _part(part: ReportPart, prefix: str, pictures: Mapping[str, str] | None) -> str:
    first = overview(part)
    head = f"## {_plain(part.name)}\n\n**{_plain(first.verdict)}**\n"
    top = _overview(first, prefix, pictures) if first.numbers else ""
    texts = (_section(section, prefix, pictures) for section in sections(part))
    return "\n".join([head, *filter(None, (top, *texts))])


def _overview(first: Overview, prefix: str, pictures: Mapping[str, str] | None) -> str:
    """The numbers and the picture; the changes follow as findings, or as the recipe."""
    notes = ("; ".join(filter(None, (one.share, one.note, one.how))) for one in first.numbers)
    lines = [f"- {one.label}: **{one.value}** ({_plain(note)})" for one, note in zip(first.numbers, notes, strict=True)]
    picture = _block(first.picture, prefix, pictures) if first.picture is not None else ""
    return "\n".join((*lines, "", picture))


def _section(section: Section, prefix: str, pictures: Mapping[str, str] | None) -> str:
    """'' for one of pictures alone, where none are drawn."""
    blocks = [text for block in section.blocks if (text := _block(block, prefix, pictures))]
    if not blocks:
        return ""
    if section.key == "findings":
        return f"### {_plain(section.title)}\n\n" + "\n".join(blocks)
    opened = " open" if pictures is not None else ""
    title = inert(
        html.escape(visible(section.title, LONGEST_LINE))
    )  # between tags Markdown's own escapes would be seen
    return f"<details{opened}><summary>{title}</summary>\n\n" + "\n".join(blocks) + "\n</details>\n"


def _block(block: Block, prefix: str, pictures: Mapping[str, str] | None) -> str:
    match block:
        case ChartBlock():
            return _picture(block, (pictures or {}).get(prefix + block.key), pictures is not None)
        case TableBlock(folded=True):
            return ""
        case TableBlock():
            return markdown(_short(block))
        case CodeBlock():
            return "\n".join(
                "\n".join((f"{_plain(t)}:", "", *_fenced(text, lang), "")) for t, text, lang in block.files
            )
        case Advice():
            return "\n".join(_finding(number, finding) for number, finding in enumerate(block.findings, 1))
        case _:
            return _LEADING.sub(r"\\\g<0>", _plain(block)) + "\n"


def _picture(picture: ChartBlock, address: str | None, drawn: bool) -> str:
    caption = _plain(picture.caption)
    if address:
        return f"![{caption}]({quote(address)})\n\n{caption} ({_plain(picture.how)})\n"
    return f"{NOT_DRAWN} {caption}\n" if drawn or (picture.doubtful and _fails(picture)) else ""


def _fails(picture: ChartBlock) -> bool:
    """Whether the chart cannot be drawn of its rows; where the package is missing, nobody knows."""
    try:
        return readable(picture.draw) is None
    except FlopwiseError:
        return False


def _short(block: TableBlock) -> Table:
    """The first rows, with a note on the rest; the title says how its numbers were obtained."""
    table = block.table
    rows = len(table.rows[: table.most])
    most = rows if block.whole else min(rows, MOST_ROWS)
    rest = rows - most
    notes = (f"and {rest} more row{'s' if rest > 1 else ''}", *table.notes) if rest else table.notes
    return replace(table, title=f"{table.title} ({block.how})" if block.how else table.title, most=most, notes=notes)


def _finding(number: int, finding: Finding) -> str:
    saves = f" {saved} (predicted)." if (saved := saving(finding, first=number == 1)) else ""
    lines = [f"{number}. **{_plain(finding.title)}**{saves}", f"   - {_plain(finding.arithmetic)}"]
    lines += [f"   - {_plain(line)}" for line in finding.evidence]
    lines += [f"   - change: {_code(options(finding.levers))}"] if finding.levers else []
    if finding.code:
        lines += ["", *(f"   {line}" for line in _fenced(finding.code, "python"))]
    return "\n".join(lines) + "\n"


def _fenced(text: str, language: str) -> list[str]:
    """Lines of code that no backtick in them can end."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return [f"{fence}{language}", *(visible(line, LONGEST_LINE) for line in text.splitlines()), fence]


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
    return max(map(len, re.findall("`+", text)), default=0)
