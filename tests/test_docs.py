"""The documentation: links lead somewhere, commands are understood, every page is in the navigation, and it stays short."""

import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest
import yaml

from flopwise.cli.main import VERBS, flopwise

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\\.)*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")
CODE = re.compile(r"^(```|~~~).*?^\1|^ {4,}\S.*?$|(`+)(?!`).+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)


def anchors(path):
    """The names that GitHub gives to a page's headings."""
    found = set()
    for heading in HEADING.findall(path.read_text(encoding="utf-8")):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(1 for one in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one))
        found.add(f"{slug}-{number}" if number else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


DOCS = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = {"reference/cli.md", "reference/levers.md", "reference/findings.md"}  # from the code, by `make pages`
MOST_WORDS = 35_000
COMMAND = re.compile(r"^(?: {4}|- run: |\$ |    \$ )((?:flopwise|python) .+)$|`(flopwise [^`]+)`", re.MULTILINE)
PLACES = re.compile(r"(?:examples|sweeps|benchmarks|tests)/[\w./-]*\w")


def test_it_stays_short():
    written = {
        path: re.sub(r"<!-- measured: .*?<!-- end -->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for path in DOCS
    }
    words = {path.relative_to(ROOT / "docs").as_posix(): len(text.split()) for path, text in written.items()}
    assert set(words) > GENERATED
    assert sum(count for page, count in words.items() if page not in GENERATED) <= MOST_WORDS


def pages_in(nav):
    """The pages of mkdocs.yml's `nav`, in order."""
    for entry in nav:
        for place in entry.values():
            if isinstance(place, str):
                yield place
            else:
                yield from pages_in(place)


def test_every_page_is_in_the_navigation_once_and_linked_from_an_index():
    nav = list(pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(nav) == [path.relative_to(ROOT / "docs").as_posix() for path in DOCS]
    linked = set()
    for index in (ROOT / "docs" / "index.md", ROOT / "docs" / "appendix" / "index.md"):
        linked |= {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert [page for page in nav if page != "index.md" and (ROOT / "docs" / page).resolve() not in linked] == []


def commands(text):
    """The command lines of a page, without comments and pipes."""
    for match in COMMAND.finditer(text):
        line = (match[1] or match[2]).partition(" #")[0]
        yield re.split(r" (?:\|\|?|&&) |; ", line)[0].strip()


def understood(words):
    """Parse a command line as click does, without running it; a verb alone is a name, not a command."""
    group, words = flopwise, list(words)
    while isinstance(group, click.Group) and words and words[0] in group.list_commands(None):
        group = group.get_command(None, words.pop(0))
    if words:
        group.make_context("flopwise", words)


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT / "docs").as_posix())
def test_commands_are_understood(page):
    """Their verbs and options are there, values are allowed, files of the repository that they name exist."""
    for line in commands(page.read_text(encoding="utf-8")):
        for place in PLACES.findall(line):
            assert (ROOT / place).exists(), line
        words = shlex.split(line)[1:] if line.startswith("flopwise ") else ["--help"]
        if "[OPTIONS]" not in words:
            assert words[0] in (*VERBS, "VERB", "WORDS", "--help"), line
            understood(words if words[0] in VERBS else ())


def test_a_command_that_is_not_understood_is_seen():
    text = "    flopwise bench tiny --batch 2    # twice\n    flopwise bench --speed 2 || true\nand `flopwise runs tag`"
    first, second, third = commands(text)
    understood(shlex.split(first)[1:])
    with pytest.raises(click.UsageError):
        understood(shlex.split(second)[1:])
    assert third == "flopwise runs tag"


class Ends(HTMLParser):
    """Where a page of the site leads to."""

    def __init__(self, page):
        super().__init__()
        self.links = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("href", "src") and value]


def build(root, place):
    pytest.importorskip("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", place]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=600, check=False)


def test_the_site_has_no_dead_link(tmp_path):
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    dead = [
        (page.relative_to(tmp_path).as_posix(), link)
        for page in tmp_path.rglob("*.html")
        if page.name != "404.html"  # its links are relative to the server's root
        for link in Ends(page).links
        if not (url := urlsplit(link)).scheme and url.path and not (page.parent / unquote(url.path)).exists()
    ]
    assert dead == []
    assert not list(tmp_path.rglob("*.py"))


@pytest.fixture
def small_site(tmp_path):
    """This site's settings and hook, one page and one file outside docs/."""
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "links.py", tmp_path / "docs")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "a.md").write_text("# A")
    (tmp_path / "docs" / "index.md").write_text("# Index")

    def make(text, settings=""):
        ours = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
        del ours["nav"], ours["extra_css"]
        (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(ours) + settings)
        (tmp_path / "docs" / "deep" / "page.md").write_text(text)
        built = build(tmp_path, tmp_path / "site")
        page = tmp_path / "site" / "deep" / "page.html"
        return built, page.read_text() if page.exists() else ""

    return make


@pytest.mark.parametrize("link", ["nowhere.md", "../index.md#nowhere", "../../benchmarks/nowhere.md", "../../../etc"])
def test_a_link_that_leads_nowhere_ends_the_build(small_site, link):
    built, _ = small_site(f"# Page\n\n[see]({link})")
    assert built.returncode != 0
    assert link.rpartition("/")[2] in built.stderr


def test_links_out_of_the_documentation(small_site):
    text = "# Page\n\n[the table](../../benchmarks/a.md), [`a.md`](../../benchmarks/a.md), [all](../../benchmarks)"
    text += ", [in](../index.md)"
    built, page = small_site(text)
    assert built.returncode == 0, built.stderr
    assert "<span>the table: <code>benchmarks/a.md</code></span>, <span><code>benchmarks/a.md</code></span>" in page
    assert 'href="../index.html"' in page
    built, page = small_site(text, "repo_url: https://example.org/flopwise/\n")
    assert built.returncode == 0, built.stderr
    assert '<a href="https://example.org/flopwise/blob/main/benchmarks/a.md">the table</a>' in page
    assert '<a href="https://example.org/flopwise/tree/main/benchmarks">all</a>' in page
