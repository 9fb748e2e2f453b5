"""The report in a real browser: whole without a network, its charts there, its tables usable, its names harmless."""

import re
from pathlib import Path

import pytest
from report_pages import COMPILED, HOSTILE, NAIVE, all_drawn, gathered, hostile_trace

from flopwise.api.report import report
from flopwise.render.charts import save
from flopwise.render.report import Report, html_report
from flopwise.render.roofline_view import roofline_chart

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11"


@pytest.fixture(scope="module")
def page_file(browser, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html_report(Report(parts=(gathered(NAIVE),), command="flopwise report naive.json.gz")))
    return path


@pytest.fixture(scope="module")
def hostile_file(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    part = gathered(hostile_trace(folder / "trace.json"), HOSTILE, HOSTILE)
    (folder / "report.html").write_text(html_report(Report(parts=(part,), command=HOSTILE)))
    return folder / "report.html"


def test_it_is_whole_without_a_network(opened, page_file):
    page, heard = opened(page_file)
    all_drawn(page)
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])
    assert page.locator("h1").inner_text().split("\n")[1].startswith("GPU-bound: the GPU is busy 93")
    charts = [one.get_attribute("data-chart") for one in page.locator("[data-chart]").all()]
    assert charts == ["waterfall", "gpu-time", "timeline", "roofline"]
    for name in charts:
        assert page.locator(f"#chart-{name} svg path").count() > 3, name
    assert page_file.stat().st_size < 5e6


def test_nothing_but_its_own_code_may_run(opened, page_file):
    page, heard = opened(page_file)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s) }"
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in line for line in heard.console)
    page.evaluate("setTimeout(() => { try { window.made = eval('1') } catch (error) { window.made = String(error) } })")
    page.wait_for_function("window.made !== undefined")
    assert "EvalError" in page.evaluate("window.made")


def test_a_header_sorts_by_the_raw_values(opened, page_file):
    page, _ = opened(page_file)
    table = page.locator("table:has(#kernel-1)")
    column = [h.get_attribute("data-key") for h in table.locator("th").all()].index("mean_ns")

    def means():
        rows = table.locator("tbody tr")
        return rows.evaluate_all(f"rows => rows.map(row => Number(row.cells[{column}].dataset.v))")

    before = means()
    table.get_by_role("button", name="mean", exact=True).click()
    assert means() == sorted(before, reverse=True) != before
    assert table.locator("th").nth(column).get_attribute("aria-sort") == "descending"
    table.get_by_role("button", name="mean", exact=True).press("Enter")
    assert means() == sorted(before)


def test_a_table_is_copied_as_csv(opened, page_file):
    page, _ = opened(page_file)
    page.locator("section:has(#kernels) button", has_text="Copy as CSV").click()
    page.wait_for_function("window.flopwise.copied")
    lines = page.evaluate("window.flopwise.copied").split("\r\n")
    assert lines[0] == "name,op,shapes,kind,count,gpu_ns,mean_ns,share"
    sizes = r'"\[\[3072, 2048\], \[2048, 768\]\]"'
    assert re.match(rf"sm80_xmma_gemm_f32f32_\w+,aten::mm,{sizes},matmul,48\.0,6\d{{6}}\.?\d*,\d+", lines[1])
    assert len(lines) > 40


def test_light_and_dark(opened, page_file):
    page, _ = opened(page_file, theme="dark")
    page.wait_for_selector("[data-ready]")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Change between light and dark").click()
    page.wait_for_selector("html[data-theme=light]")
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert page.evaluate(ground) == "rgb(255, 255, 255)" != dark


def test_by_keyboard_alone(opened, page_file):
    page, _ = opened(page_file)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"theme", "perfetto-open", "All changes", "Copy as CSV"} <= reached
    page.locator("#theme").focus()
    page.keyboard.press("Space")
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_a_finding_leads_to_its_kernel(opened, page_file):
    page, _ = opened(page_file)
    page.locator(".findings summary").first.click()
    page.locator(".findings a").first.click()
    assert page.evaluate("location.hash") == "#kernel-1"
    assert page.locator("tr:target").is_visible()


def test_a_click_goes_into_a_part_of_the_gpu_time(opened, page_file):
    page, heard = opened(page_file)
    all_drawn(page)
    chart = page.locator("#chart-gpu-time")
    chart.scroll_into_view_if_needed()
    texts = "#chart-gpu-time svg g.role-axis-label text"
    before = page.locator(texts).all_text_contents()
    chart.locator("svg g.mark-rect path").nth(1).click()
    page.wait_for_function(
        f"[...document.querySelectorAll('{texts}')].map(t => t.textContent).join() != {','.join(before)!r}"
    )
    assert heard.errors == []


def test_a_part_of_the_gpu_time_is_chosen_by_keyboard(opened, page_file):
    page, heard = opened(page_file)
    all_drawn(page)
    texts = "#chart-gpu-time svg g.role-axis-label text"

    def shown():
        page.wait_for_timeout(100)
        return page.locator(texts).all_text_contents()

    whole, box = shown(), page.locator("select[data-into=gpu-time]")
    box.focus()
    page.keyboard.press("ArrowDown")  # a closed list is chosen from at once
    inside = shown()
    assert inside != whole
    assert box.evaluate("box => box.selectedOptions[0].textContent").startswith("backward")
    page.keyboard.press("Escape")
    assert shown() == whole
    page.locator("#chart-gpu-time svg g.mark-rect path").nth(0).click()
    assert box.evaluate("box => box.selectedOptions[0].textContent").startswith("backward")
    assert shown() == inside
    page.locator("#theme").click()
    page.wait_for_selector("html[data-theme=dark]")
    assert shown() == inside  # the other theme shows the same part
    assert heard.errors == []


def test_printing_draws_what_was_not_in_sight(opened, page_file):
    page, _ = opened(page_file)
    page.wait_for_selector("#theme")
    assert page.locator("[data-ready]").count() < page.locator("[data-chart]").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(
        "document.querySelectorAll('[data-ready]').length === document.querySelectorAll('[data-chart]').length"
    )


@pytest.mark.parametrize("width", [390, pytest.param(800, marks=pytest.mark.slow)])
def test_a_narrow_screen_scrolls_inside_not_as_a_whole(opened, page_file, width):
    page, _ = opened(page_file, width=width)
    all_drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_are_text(opened, hostile_file):
    page, heard = opened(hostile_file)
    all_drawn(page)
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert shown in page.locator(".findings h3").inner_text()
    assert 'onerror="window.hacked=1"><b>' in page.locator("footer").inner_text()
    assert shown in page.locator("#kernel-1 td").first.get_attribute("title")
    page.locator("#chart-gpu-time svg g.mark-rect path").nth(2).hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "</script><img" in page.locator("#vg-tooltip-element").inner_text()
    assert page.locator("#vg-tooltip-element img, #vg-tooltip-element b").count() == 0


@pytest.mark.slow
def test_several_targets_on_one_page(opened, tmp_path):
    place = report(RUNS / "launch-bound", RUNS / "course-attention", COMPILED, output=tmp_path / "all.html")
    page, heard = opened(place)
    all_drawn(page)
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])
    assert page.locator("nav a").all_inner_texts()[:2] == ["sweep launch-bound", "sweep course-attention"]
    charts = [one.get_attribute("data-chart") for one in page.locator("[data-chart]").all()]
    assert {"t1-points", "t1-samples", "t2-sweep-wall_ms", "t2-sweep-peak_gib", "t3-gpu-time"} <= set(charts)
    labels = page.locator("#chart-t1-points svg g.role-axis-label text").all_text_contents()
    assert len([label for label in labels if "compile=" in label]) == 4  # none hides another
    assert len(re.findall(r' id="([^"]+)"', place.read_text())) == len(
        set(re.findall(r' id="([^"]+)"', place.read_text()))
    )


@pytest.mark.slow
def test_two_traces_are_set_side_by_side(opened, tmp_path):
    page, heard = opened(report(NAIVE, COMPILED, output=tmp_path / "both.html"))
    all_drawn(page)
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])
    assert page.locator("nav a").first.inner_text() == "Side by side"
    labels = page.locator("#chart-side-by-side svg g.role-axis-label text").all_text_contents()
    assert [label[:2] for label in labels if "h200" in label] == ["1.", "2."]
    assert page.locator("section:has(#side-by-side) tbody tr").count() == 2


@pytest.mark.slow
def test_measured_steps_have_their_prediction_beside_them(opened, tmp_path):
    page, heard = opened(report(RUNS / "launch-bound", output=tmp_path / "predicted.html"))
    all_drawn(page)
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])
    labels = page.locator("#chart-predicted-steps svg g.role-axis-label text").all_text_contents()
    assert len([label for label in labels if "compile=" in label]) == 4
    assert page.locator("section:has(#predicted) tbody tr").count() == 4


def test_a_chart_of_its_own_runs_under_its_policy(opened, tmp_path):
    points = [{"name": HOSTILE, "kind": "matmul", "intensity": 200.0, "flops_per_s": 5e14, "ms": 2.0}]
    save(roofline_chart(points, {"bf16": 9.89e14}, 4.8e12, HOSTILE, ""), tmp_path / "chart.html")
    page, heard = opened_without_theme(opened, tmp_path / "chart.html")
    assert page.locator("#chart svg").count() == 1
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])


def opened_without_theme(opened, path):
    text = path.read_text().replace('<html lang="en">', '<html lang="en" data-theme="light">')
    path.write_text(text)
    page, heard = opened(path)
    page.wait_for_selector("#chart svg")
    return page, heard


@pytest.mark.slow
def test_on_paper_the_sizes_of_an_operation_have_room(opened, tmp_path):
    page, _ = opened(report(NAIVE, output=tmp_path / "paper.html"), width=718)  # A4 within its margins
    page.emulate_media(media="print")
    assert page.locator("th[data-key=shapes]").first.bounding_box()["width"] > 100
