"""The page used as a reader uses it: printed, sorted, handed to Perfetto; and names that would lead it elsewhere."""

import json
from pathlib import Path

import pytest
from report_pages import NAIVE, all_drawn, gathered

from flopwise.api.report import report
from flopwise.experiments.experiment import Verdict
from flopwise.experiments.results import LabRun, Planned, Result
from flopwise.render.report import Report, ReportPart, html_report

LEADS_AWAY = 'x"><meta http-equiv=refresh content="0;url=https://evil.example/?leak"><h1>PWNED'


@pytest.fixture(scope="module")
def page_file(browser, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html_report(Report(parts=(gathered(NAIVE),))))
    return path


def test_an_experiments_name_leads_nowhere(opened, tmp_path):
    result = Result(experiment=LEADS_AWAY, claim="c", status="ok", verdict=Verdict("held", "w"))
    found = LabRun(run="r", planned=Planned(experiments=(LEADS_AWAY,)), results=(result, result))
    part = ReportPart(name="lab", lab=found)
    for number, parts in enumerate(((part,), (part, part))):
        path = tmp_path / f"{number}.html"
        path.write_text(html_report(Report(parts=parts)))
        page, heard = opened(path)
        page.wait_for_timeout(300)
        assert page.url == path.as_uri()
        assert (heard.requests, heard.errors, heard.console) == ([], [], [])
        assert page.locator("h1").count() == 1
        assert page.locator("meta[http-equiv=refresh]").count() == 0
        assert page.get_by_role("heading", name="PWNED", exact=False).first.inner_text() == LEADS_AWAY
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids))
        links = page.evaluate("[...document.querySelectorAll('nav a')].map((one) => one.hash.slice(1))")
        assert set(links) <= set(ids)


def test_paper_has_column_headings_and_whole_lines_of_code(opened, page_file):
    page, _ = opened(page_file, width=718)
    page.emulate_media(media="print")
    heads = page.locator("section:has(#kernels) th button")
    assert [one.inner_text() for one in heads.all()][:4] == ["kernel", "launched by", "shapes", "class"]
    assert heads.first.is_visible()
    assert not page.locator("#theme").is_visible()
    assert page.locator("pre").first.evaluate("pre => getComputedStyle(pre).whiteSpace") == "pre-wrap"


@pytest.mark.slow
def test_the_dark_theme_prints_dark_on_white(opened, page_file):
    page, _ = opened(page_file, theme="dark")
    all_drawn(page)
    label = page.locator("#chart-waterfall svg g.role-axis-label text").first
    colour = "one => getComputedStyle(one).fill"
    assert label.evaluate(colour) == "rgb(230, 233, 237)"
    badge = page.locator(".how.predicted").first
    bright = badge.evaluate("one => getComputedStyle(one).color")
    page.emulate_media(media="print")
    assert label.evaluate(colour) == "rgb(0, 0, 0)"
    assert badge.evaluate("one => getComputedStyle(one).color") == "rgb(107, 70, 0)" != bright


@pytest.mark.slow
def test_what_was_folded_is_folded_again_after_printing(opened, page_file):
    page, _ = opened(page_file)
    before = page.locator("details[open]").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == before


def test_blanks_sort_last_and_the_total_stays_below(opened, page_file):
    page, _ = opened(page_file)
    table = page.locator("table", has=page.locator("th[data-key=optimizer_ns]"))
    place = [one.get_attribute("data-key") for one in table.locator("th").all()].index("optimizer_ns")
    for _ in ("descending", "ascending"):
        # By a key: charts are drawn as they come into view, and may push a table away from under the mouse.
        table.locator("th").nth(place).locator("button").press("Enter")
        names = table.locator("tbody tr td:first-child").all_inner_texts()
        assert (names[0], names[-1]) == ("optimizer", "all")
        cells = table.locator(f"tbody tr td:nth-child({place + 1})").all_inner_texts()
        assert "" in cells
        assert all(cell == "" for cell in cells[1:-1])


def test_without_a_network_perfetto_is_not_tried(opened, page_file):
    """Whether `set_offline` reaches `navigator.onLine` differs between releases of Chromium, so it is set here."""
    page, _ = opened(page_file)
    page.evaluate("() => Object.defineProperty(navigator, 'onLine', { get: () => false })")
    page.evaluate("() => { window.open = () => { window.tried = true; }; }")
    page.locator("#perfetto-open").click()
    assert "needs a network" in page.locator("#said").inner_text()
    assert page.evaluate("window.tried") is None


@pytest.mark.slow
def test_perfetto_that_does_not_answer_is_told_and_the_same_file_may_be_chosen_again(opened, page_file, tmp_path):
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps({"traceEvents": []}))
    page, _ = opened(page_file)
    page.clock.install()
    page.context.set_offline(False)  # the routes still refuse every request
    page.evaluate(
        "() => { window.tries = 0; window.open = () => { window.tries++; return { closed: false, postMessage: () => {} }; } }"
    )
    for tries in (1, 2):
        with page.expect_file_chooser() as chosen:
            page.locator("#perfetto-open").click()
        chosen.value.set_files(trace)
        page.wait_for_function(f"window.tries === {tries}")
        page.wait_for_function("document.getElementById('said').textContent.startsWith('waiting')")
        told = []
        while len(told) < 70 and "no answer from Perfetto" not in "".join(told[-1:]):  # what is told goes away again
            page.clock.run_for(1_000)
            told.append(page.locator("#said").inner_text())
        assert "no answer from Perfetto" in told[-1]


LAB = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11" / "lab"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_the_lab_on_a_dark_screen(opened, tmp_path, width):
    """The verdicts fit the screen, and so do charts side by side; their headings can be read."""
    page, heard = opened(report(LAB, output=tmp_path / "lab.html"), width=width, theme="dark")
    all_drawn(page)
    table = page.locator(".scroll").first
    assert table.evaluate("(box) => box.scrollWidth <= box.clientWidth")
    chart = page.locator("#chart-lab-mlp-scaling-1")
    assert chart.evaluate("(box) => box.scrollWidth <= box.clientWidth")
    heading = chart.locator("text", has_text="layers").first
    assert heading.evaluate("(one) => getComputedStyle(one).fill") == page.evaluate(
        "getComputedStyle(document.body).color"
    )
    assert heard.errors == []
