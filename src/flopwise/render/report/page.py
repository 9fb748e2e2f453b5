"""The report as one HTML page: whole in itself, fetching nothing, running only its own code.

Everything that comes from outside (names of kernels, modules, files, notes) is written as text by `_text`, and into the charts'
data by `_json`; a content-security policy with the hashes of the page's own scripts and style lets nothing else run. Vega
works under it because its expressions are interpreted (`ast`), not compiled. It is packed, and unpacked by the page's code: a
third of the bytes, and the policy's hash is that of the script itself.
"""

import base64
import gzip
import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from flopwise.records.finding import Finding
from flopwise.records.table import Table
from flopwise.render.charts import NOT_DRAWN, csp_hash, readable
from flopwise.render.findings_view import options
from flopwise.render.report.evidence import (
    MEASURED,
    PREDICTED,
    SPECIFIED,
    Advice,
    Block,
    Change,
    ChartBlock,
    CodeBlock,
    Number,
    Overview,
    Report,
    ReportPart,
    Section,
    TableBlock,
    slug,
)
from flopwise.render.report.overview import about, finding_keys, overview
from flopwise.render.report.sections import sections, side_by_side
from flopwise.render.report.verdict import saving, short_command
from flopwise.render.table import ShownColumn, ShownTable, shown
from flopwise.render.vega import vega_javascript
from flopwise.render.visible import LONGEST_LINE, visible

_UNIT = re.compile(r"(\d) (?=(?:s|ms|µs|ns|%|[KMGT]iB|B)\b|%)")  # a number and its unit stay on one line
_LONG = 60  # characters from which a cell may be broken into lines
_FEW = 5  # columns up to which a table's sentences stand below the rest of their row on a narrow screen
_WIDE = 9  # columns from which a table is printed in small letters
_FOLDED = 15  # rows from which on a table shows the first ones alone until asked
_PAGE = 200  # rows from which on a table is shown in pages
_RAW = 4000  # characters of a name that are kept to be copied
_READY = 'dispatchEvent(new Event("vega"));'  # what the page waits for
_NO_SCRIPT = (
    f"The charts need JavaScript; every number is in the tables, too, of which {_PAGE} rows are shown without it."
)
_BADGES = (MEASURED, PREDICTED, SPECIFIED)  # that have a colour of their own


def html_report(report: Report) -> str:
    """The page."""
    charts: dict[str, Any] = {}
    several = len(report.parts) > 1
    built = [sections(part) for part in report.parts]
    firsts = [overview(part) for part in report.parts]
    named = zip(report.parts, firsts, built, report.prefixes(), strict=True)
    bodies = [_part(part, first, of_part, prefix, several, charts) for part, first, of_part, prefix in named]
    together = side_by_side(report.parts)
    if together is not None:
        bodies.insert(0, _section(together, "", 2, charts))
    main = leading(report.parts)
    subject_line = about(main)
    style, code, vega = _resource("page.css"), _resource("page.js"), f"{vega_javascript()}\n{_READY}"
    scripts = f"script-src {csp_hash(vega)} {csp_hash(code)}; style-src {csp_hash(style)}"
    policy = f"default-src 'none'; {scripts}; img-src data:; base-uri 'none'; form-action 'none'"
    subject = f"{main.name}: " if several and main.name not in subject_line else ""
    heading = _kept_whole(_text(subject + firsts[report.parts.index(main)].verdict))
    packed = base64.b64encode(gzip.compress(vega.encode(), mtime=0)).decode()
    return f"""<!doctype html>
<html lang="en" data-theme="light"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">
<title>{_text(subject_line, 120)}: flopwise</title><style>{style}</style></head>
<body><a class="skip" href="#main">Skip to the report</a>
<header><div class="bar"><span>flopwise report</span><span>{_perfetto(report.parts)}
<button id="theme" type="button" aria-label="Change between light and dark">Dark</button></span></div>
<h1><span id="about">{_text(subject_line, 200)}</span> {heading}</h1>{_contents(report, together, built[0])}</header>
<main id="main">{"".join(bodies)}</main>
<footer>{_made_by(report)}<noscript><p>{_NO_SCRIPT}</p></noscript></footer>
<div id="said" role="status" aria-live="polite"></div>
<script type="application/json" id="specs">{_json(charts)}</script>
<script type="text/plain" id="vega">{packed}</script><script type="module">{code}</script></body></html>
"""


def leading(parts: Sequence[ReportPart]) -> ReportPart:
    """The part whose verdict heads the report: the one that says most about why."""
    return max(
        parts,
        key=lambda p: (
            p.ranks is not None,
            p.waterfall is not None,
            p.explanation is not None,
            bool(p.pairs),
            p.memory is not None,
        ),
    )


def _part(
    part: ReportPart, first: Overview, of_part: Sequence[Section], prefix: str, several: bool, charts: dict[str, Any]
) -> str:
    level = 3 if several else 2
    head = f'<h2 id="{prefix}top">{_text(part.name, 200)}</h2><p class="verdict">{_text(first.verdict)}</p>'
    top = _overview(first, prefix, level, charts) if first.numbers else ""
    return (head if several else "") + top + "".join(_section(one, prefix, level, charts) for one in of_part)


def _overview(first: Overview, prefix: str, level: int, charts: dict[str, Any]) -> str:
    """The numbers in a row; below them the picture, and next to it the changes."""
    picture = _picture(first.picture, prefix, charts) if first.picture is not None else ""
    changes = "".join(_change(one, prefix, level + 1) for one in first.changes)
    how = _how(first.how) if changes else ""
    heading = f'<h{level} id="{prefix}first">{_text(first.heading)} {how}</h{level}>'
    listed = f'<ol class="changes">{changes}</ol>' if changes else ""
    advice = f"<div>{heading}{listed}</div>" if first.heading else ""
    numbers = "".join(map(_number, first.numbers))
    pair = f'<div class="pair">{picture}{advice}</div>' if picture or advice else ""
    return f'<section class="first" aria-label="At a glance"><dl class="numbers">{numbers}</dl>{pair}</section>\n'


def _number(one: Number) -> str:
    share = f"<dd>{_text(one.share)}</dd>" if one.share else ""
    note = f"<dd>{_text(one.note)} {_how(one.how)}</dd>"
    return f"<div><dt>{_text(one.label)}</dt><dd><b>{_kept_whole(_text(one.value))}</b></dd>{share}{note}</div>"


def _change(one: Change, prefix: str, level: int) -> str:
    saves = _kept_whole(_text(one.saves))
    more = f' <a href="#{prefix}{one.anchor}">{_text(one.link)}</a>' if one.anchor else ""
    why = f"<p>{_text(_sentence(one.why))}{more}</p>" if one.why or more else ""
    line = _code(one.line.partition("  #")[0]) if one.line else ""  # its comment is below, with the rest of the code
    return f"<li><h{level}>{_text(one.title)} <b>{saves}</b></h{level}>{why}{line}</li>"


def _section(section: Section, prefix: str, level: int, charts: dict[str, Any]) -> str:
    key = prefix + section.key
    blocks = "".join(_block(block, f"{key}-{i}", prefix, charts) for i, block in enumerate(section.blocks))
    return (
        f'<section aria-labelledby="{key}"><h{level} id="{key}">{_text(section.title)}</h{level}>{blocks}</section>\n'
    )


def _block(block: Block, key: str, prefix: str, charts: dict[str, Any]) -> str:
    match block:
        case ChartBlock():
            return _picture(block, prefix, charts)
        case TableBlock():
            return _table(block, key, prefix)
        case Advice():
            return _advice(block, prefix)
        case CodeBlock():
            heads = (f'<div class="head"><span>{_text(title)}</span></div>' for title, _, _ in block.files)
            codes = (f"<div>{head}{_code(text)}</div>" for head, (_, text, _) in zip(heads, block.files, strict=True))
            return f'<div class="codes">{"".join(codes)}</div>'
        case _:
            return f"<p>{_text(block)}</p>"


def _picture(picture: ChartBlock, prefix: str, charts: dict[str, Any]) -> str:
    spec = readable(picture.draw)
    if spec is None:
        return f"<figure><p>{NOT_DRAWN}</p><figcaption>{_text(picture.caption)}</figcaption></figure>"
    name, use = prefix + picture.key, f' <span class="use">{_text(picture.use)}</span>' if picture.use else ""
    charts[name] = {**spec, "description": visible(picture.caption, LONGEST_LINE)}
    button = f'<button type="button" data-image="{name}">Copy as image</button>'
    return (
        f'<figure><div class="chart" data-chart="{name}" id="chart-{name}"></div>{_into(picture, name)}'
        f"<figcaption>{button}{_how(picture.how)} {_text(picture.caption)}{use}</figcaption></figure>"
    )


def _into(picture: ChartBlock, name: str) -> str:
    """The parts one can go into, for the keyboard; hidden until the page's code runs."""
    if not picture.parts:
        return ""
    options = "".join(
        f'<option data-from="{x0!r}" data-to="{x1!r}">{_text(part)}</option>' for part, x0, x1 in picture.parts
    )
    whole = '<option value="">the whole step</option>'
    return f'<label class="into" hidden>Go into <select data-into="{name}">{whole}{options}</select></label>'


def _table(block: TableBlock, key: str, prefix: str) -> str:
    table, seen = block.table, shown(block.table)
    heads = "".join(map(_head, seen.columns))
    rows, count = [], len(seen.cells)
    paged = count > _PAGE and not block.anchors
    written = seen.cells[:_PAGE] if paged else seen.cells
    for i, (row, cells) in enumerate(zip(table.rows, written, strict=False)):
        name = f' id="{prefix}{block.anchors[i]}"' if i < len(block.anchors) else ""
        inner = "".join(_cell(c, row.get(c.column.key), cell) for c, cell in zip(seen.columns, cells, strict=True))
        total = ' class="total"' if table.total and i == len(table.rows) - 1 else ""
        rows.append(f"<tr{name}{total}>{inner}</tr>")
    notes = "".join(f"<li>{_text(note)}</li>" for note in seen.notes)
    kind = _kind(seen)
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(seen.title)}"><table id="{key}"{kind}>'
    body = f'<div class="frame">{box}<thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></div>'
    body += _unfolding(count, key, paged) + (_pager(table, seen, key) if paged else "")
    body += f'<ul class="notes">{notes}</ul>' if notes else ""
    copies = f'<button type="button" data-copies="{key}">Copy as CSV</button>'
    if block.folded:
        head = f'<div class="head"><span></span>{_how(block.how)}{copies}</div>'
        return f"<details><summary>{_text(seen.title)}</summary>{head}{body}</details>"
    return f'<div class="head"><span>{_text(seen.title)}</span>{_how(block.how)}{copies}</div>{body}'


def _kind(seen: ShownTable) -> str:
    prose = len(seen.columns) <= _FEW and any(column.wraps for column in seen.columns)
    return ' class="wide"' if len(seen.columns) > _WIDE else ' class="prose"' if prose else ""


def _unfolding(count: int, key: str, paged: bool) -> str:
    """What shows more than the first rows."""
    pages = f", in pages of {_PAGE}" if paged else ""
    button = f'<button type="button" data-rows="{key}" hidden>All {count:,} rows{pages}</button>'
    return button if count > _FOLDED else ""


def _pager(table: Table, seen: ShownTable, key: str) -> str:
    """Every row as data, of which the page's code makes those asked for, and what one asks with."""
    columns = [c.column.key for c in seen.columns]
    rows = [
        [_packed(row.get(name), cell) for name, cell in zip(columns, cells, strict=True)]
        for row, cells in zip(table.rows, seen.cells, strict=False)
    ]
    data = _json({"rows": rows, "page": _PAGE, "long": _LONG, "total": table.total and len(rows) == len(table.rows)})
    steps = ((-1, "‹ Previous"), (1, "Next ›"))
    back, on = (f'<button type="button" data-step="{step}" hidden>{name}</button>' for step, name in steps)
    starts = range(0, len(rows), _PAGE)
    spans = (f"{start + 1:,} to {min(start + _PAGE, len(rows)):,}" for start in starts)
    listed = "".join(f'<option value="{start}">{span}</option>' for start, span in zip(starts, spans, strict=True))
    place = f'<label>rows <select aria-label="Rows">{listed}</select> of {len(rows):,}</label>'
    script = f'<script type="application/json" id="{key}-rows">{data}</script>'
    return f'<div class="pager" data-pages="{key}">{back}{place}{on}</div>{script}'


def _packed(raw: Any, text: str) -> str | list[str | int]:
    """A cell for the page's code: its text; its raw value where that is another; 1 where a pointer is to show that."""
    kept = _kept(raw)
    return text if kept == text else [text, kept, 1] if isinstance(raw, str) else [text, kept]


def _kept(raw: Any) -> str:
    """A raw value as it is copied and sorted by."""
    return "" if raw is None else visible(str(raw), _RAW)


def _head(c: ShownColumn) -> str:
    kind = ' class="right"' if c.right else ' class="wraps"' if c.wraps else ""
    button = f'<button type="button">{_text(c.heading)}</button>'
    return f'<th scope="col" aria-sort="none" data-key="{_text(c.column.key)}"{kind}>{button}</th>'


def _cell(c: ShownColumn, raw: Any, text: str) -> str:
    """A cell with its raw value, where that is another."""
    kept = _kept(raw)
    value = f' data-v="{_text(kept, _RAW)}"' if kept != text else ""
    title = f' title="{_text(kept, 1000)}"' if isinstance(raw, str) and kept != text else ""
    kinds = ("right" if c.right else "long" if len(text) > _LONG else "", "wraps" if c.wraps else "")
    kind = " ".join(filter(None, kinds))
    return f"<td{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}{value}{title}>{_text(text, None)}</td>"


def _advice(block: Advice, prefix: str) -> str:
    keys = finding_keys(block.findings)
    items = (
        _finding(finding, kernels, prefix, key, first=place == 0)
        for place, (finding, kernels, key) in enumerate(zip(block.findings, block.kernels, keys, strict=True))
    )
    return f'<ol class="findings">{"".join(items)}</ol>'


def _finding(finding: Finding, kernels: Sequence[tuple[str, str]], prefix: str, key: str, first: bool) -> str:
    lines = [_text(line) for line in (finding.arithmetic, *finding.evidence) if line]
    lines += [f'<a href="#{prefix}{slug(anchor)}">{_text(name)}</a>' for anchor, name in kernels]
    lines.append(f"confidence: {_text(finding.confidence)}")
    parts = [
        f"<h3>{_text(_sentence(finding.title))}</h3>",
        f'<p class="saves">{_text(saved)} {_how(PREDICTED)}</p>' if (saved := saving(finding, first)) else "",
        f"<p>Change: <code>{_text(options(finding.levers))}</code></p>" if finding.levers else "",
        _code(finding.code) if finding.code else "",
        f'<details><summary>Evidence</summary><ul class="notes"><li>{"<li>".join(lines)}</ul></details>',
    ]
    return f'<li id="{prefix}{key}">{"".join(parts)}</li>'


def _code(text: str) -> str:
    """Lines with a button that copies them as they are."""
    return f'<pre><button type="button" data-code>Copy</button><code>{_lines(text)}</code></pre>'


def _contents(report: Report, together: Section | None, first: Sequence[Section]) -> str:
    if len(report.parts) > 1:
        links = [(together.key, together.title)] if together else []
        links += [(f"{prefix}top", part.name) for part, prefix in zip(report.parts, report.prefixes(), strict=True)]
    else:
        links = [(section.key, section.title) for section in first]
    items = "".join(f'<li><a href="#{key}">{_text(title, 80)}</a></li>' for key, title in links)
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


def _perfetto(parts: Sequence[ReportPart]) -> str:
    if not any(part.explanation is not None and part.explanation.source == "kineto" for part in parts):
        return ""
    return (
        '<button id="perfetto-open" type="button" title="Asks for the trace\'s file and hands it to ui.perfetto.dev '
        'in a new tab, which reads it inside the browser">Open the trace in Perfetto…</button>'
        '<input id="trace-file" type="file" accept=".json,.gz" hidden aria-label="The trace\'s file">'
    )


def _made_by(report: Report) -> str:
    return f"<p>Made by <code>{_text(short_command(report.command))}</code></p>" if report.command else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _kept_whole(text: str) -> str:
    """Numbers stay on one line with their units."""
    return _UNIT.sub("\\1\N{NO-BREAK SPACE}", text)


def _how(how: str) -> str:
    """
    >>> _how("measured and predicted"), _how("")
    ('<span class="how measured">measured and predicted</span>', '')
    """
    return f'<span class="how {how if how in _BADGES else MEASURED}">{_text(how)}</span>' if how else ""


def _text(text: str, limit: int | None = LONGEST_LINE) -> str:
    """Text from anywhere as HTML shows it: nothing in it is a tag, ends an attribute, or steers.

    >>> _text('</script><img src="x">')
    '&lt;/script&gt;&lt;img src=&quot;x&quot;&gt;'
    """
    return html.escape(visible(text, limit), quote=True)


def _lines(text: str) -> str:
    return "\n".join(_text(line) for line in text.splitlines())


def _json(content: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it is in, nor open a comment there."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _resource(name: str) -> str:
    return importlib.resources.files("flopwise.render.report").joinpath(name).read_text(encoding="utf-8")
