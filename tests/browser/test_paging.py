"""A table of hundreds of rows, a page at a time: turned, sorted, copied; and names that would do something in it."""

import pytest
from report_pages import HOSTILE

from flopwise.api.report import report
from flopwise.records.run import OK, PhaseTimes, Point
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run

COUNT = 450


@pytest.fixture(scope="module")
def page_file(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    works = [workload("small", batch=n % 20 + 1, context=16 * (n // 20 + 1)) for n in range(COUNT)]
    trials = [Trial(workload=work, device="cpu", sampling=Sampling(samples=6)) for work in works]
    with Run.create(folder / "runs", "sweep", HOSTILE, "flopwise sweep", trials) as run:
        for n, trial in enumerate(trials):
            failed = {"status": "oom", "reason": HOSTILE} if n % 3 == 2 else {"status": OK}
            walls = tuple(10**6 * (n + 1) + i for i in range(6))
            run.append(Point(key=trial.key(), trial=trial, phases=(PhaseTimes(phase="step", wall_ns=walls),), **failed))
    return report(run.path, output=folder / "page.html")


def rows(page):
    """Every row in the page: of each cell its text and its attributes."""
    return page.locator("table:has(th[data-key=wall_ns]) tbody").first.evaluate(
        "body => [...body.rows].map(row => [...row.cells].map(cell =>"
        " [cell.textContent, ...['class', 'data-v', 'title'].map(name => cell.getAttribute(name) || '')]))"
    )


def test_every_row_can_be_reached(opened, page_file):
    page, heard = opened(page_file)
    first = rows(page)
    assert page.locator("tbody tr:visible").first.is_visible()
    box = page.locator("[data-pages]")
    assert not box.is_visible()
    unfold = page.get_by_role("button", name="All 450 rows, in pages of 200")
    unfold.press("Enter")
    assert box.is_visible()
    back, on = box.get_by_role("button", name="Previous"), box.get_by_role("button", name="Next")
    assert back.is_disabled()
    on.press("Enter")
    second = rows(page)
    on.press("Enter")
    third = rows(page)
    assert on.is_disabled()
    assert [len(some) for some in (first, second, third)] == [200, 200, 50]
    assert [cells[0][0] for cells in (*first, *second, *third)] == [str(n % 20 + 1) for n in range(COUNT)]
    box.get_by_role("combobox").select_option("1 to 200")
    assert rows(page) == first  # as the page's code makes them, and as they were written
    assert back.is_disabled()
    assert any(cell[0].startswith(f"oom: {HOSTILE[:20]}") for cells in second for cell in cells)
    assert page.evaluate("window.hacked") is None
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])


def test_sorting_and_copying_are_of_all_rows(opened, page_file):
    page, heard = opened(page_file)
    page.get_by_role("button", name="All 450 rows, in pages of 200").press("Enter")
    page.locator("[data-pages] button", has_text="Next").press("Enter")
    table = page.locator("table:has(th[data-key=wall_ns])").first
    place = [one.get_attribute("data-key") for one in table.locator("th").all()].index("wall_ns")
    table.locator("th").nth(place).locator("button").press("Enter")
    assert page.locator("[data-pages] select").input_value() == "0"
    walls = [float(cells[place][2] or cells[place][0]) for cells in rows(page)]
    assert walls == [10**6 * n + 2.5 for n in range(COUNT, COUNT - 200, -1)]
    page.locator("section:has(#measured) [data-copies]").first.press("Enter")
    lines = page.evaluate("window.flopwise.copied").splitlines()
    assert len(lines) == COUNT + 1
    assert [float(line.split(",")[place]) for line in lines[1:]] == [10**6 * n + 2.5 for n in range(COUNT, 0, -1)]
    assert (heard.requests, heard.errors) == ([], [])


def test_paper_says_which_rows_it_has(opened, page_file):
    page, _ = opened(page_file, width=718)
    page.emulate_media(media="print")
    assert page.locator("[data-pages] label").is_visible()
    assert not page.locator("[data-pages] button").first.is_visible()


def test_without_scripts_the_first_rows_are_there_and_the_page_says_so(opened, page_file):
    page, _ = opened(page_file, java_script_enabled=False)
    assert page.locator("[data-pages] label").is_visible()
    assert page.locator("tbody tr").nth(150).is_visible()
    assert "200 rows are shown without it" in page.locator("noscript").inner_text()
