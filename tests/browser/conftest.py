"""A real Chromium with the network off; where there is none, the tests say so and are skipped."""

import os
import shutil
from dataclasses import dataclass, field

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _chromium():
    given = os.environ.get("FLOPWISE_CHROMIUM", "")
    return given or next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Heard:
    """What a page said and asked for."""

    console: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    requests: list = field(default_factory=list)


@pytest.fixture(scope="session")
def browser():
    path = _chromium()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no browser tests without the package playwright")
    with sync_api.sync_playwright() as playwright:
        # No sandbox: containers forbid it to root, and the pages are our own.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    """Open a page in a context without network; whatever it asks for besides itself is refused, and noted."""
    contexts = []

    def open_page(path, width=1200, theme="light", **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **options)
        contexts.append(context)
        context.set_offline(True)
        page, heard = context.new_page(), Heard()
        url = path.resolve().as_uri()

        def answer(route):
            if route.request.url.partition("#")[0] == url:
                route.continue_()
            else:
                heard.requests.append(route.request.url)
                route.abort()

        page.route("**/*", answer)
        page.on("console", lambda message: heard.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.errors.append(str(error)))
        page.goto(url)
        page.wait_for_selector("[data-theme]")
        return page, heard

    yield open_page
    for context in contexts:
        context.close()
