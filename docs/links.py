"""A hook of the documentation's site: links that leave docs/ lead to the repository, or are names where it has no address.

In the repository such links are relative, and GitHub follows them; a site has nothing at their end.
"""

import logging
import posixpath
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]


class _Outside(Treeprocessor):
    """Runs before mkdocs's own, which looks for every link's end among the pages."""

    def __init__(self, repository: str) -> None:
        super().__init__()
        self.repository = repository.rstrip("/")
        self.page = ""

    def run(self, root: Element) -> None:
        for link in list(root.iter("a")):
            if path := _outside(self.page, link.get("href", "")):
                _lead(link, path, self.repository)


def _outside(page: str, href: str) -> str:
    """The file or folder of the repository, outside docs/, that a page's link leads to; '' for any other link."""
    url = urlsplit(href)
    if url.scheme or url.netloc or not url.path:
        return ""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), url.path))
    inside = path == "docs" or path.startswith(("docs/", "../", "/"))
    return "" if inside or not (_ROOT / path).exists() else path


def _lead(link: Element, path: str, repository: str) -> None:
    if repository:
        kind = "tree" if (_ROOT / path).is_dir() else "blob"
        link.set("href", f"{repository}/{kind}/main/{path}")
        return
    named = "".join(link.itertext()) in path  # then the whole name says it better
    link.tag = "span"
    link.attrib.clear()
    if named:
        link[:], link.text = [], None
    elif len(link):
        link[-1].tail = f"{link[-1].tail or ''}: "
    else:
        link.text = f"{link.text or ''}: "
    SubElement(link, "code").text = path


class _OutsideExtension(Extension):
    def __init__(self, repository: str) -> None:
        super().__init__()
        self.processor = _Outside(repository)

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 — markdown's own name
        md.treeprocessors.register(self.processor, "outside", 5)  # after inline at 20, before mkdocs's relpath at 0


_current: list[_OutsideExtension] = []


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Once for each build. `--quiet` would hide broken links from `--strict`, which counts what is logged."""
    logger = logging.getLogger("mkdocs")
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))
    _current[:] = [_OutsideExtension(config.repo_url or "")]
    config.markdown_extensions.append(_current[0])
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links are relative to the page."""
    _current[0].processor.page = page.file.src_uri
    return markdown
