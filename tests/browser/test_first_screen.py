"""What one sees first, and what one can take away: on every width, in both themes, with hostile names."""

import base64
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from report_pages import HOSTILE, NAIVE, all_drawn, gathered, hostile_trace

from flopwise.api.report import gather, report
from flopwise.render.report import Report, html_report

TUNED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11-tune-final" / "small-4x512"
PNG = b"\x89PNG\r\n\x1a\n"

# What is drawn beyond the box it is in: words in charts, and boxes of text that do not scroll.
OUTSIDE = """() => [...document.querySelectorAll('.first svg')].flatMap((svg) => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter((text) => {
    const one = text.getBoundingClientRect();
    return one.width && (one.left < box.left - 1 || one.right > box.right + 1);
  }).map((text) => text.textContent);
}).concat([...document.querySelectorAll('h1, h2, h3, h4, p, li, dd, dt, pre, figcaption, .numbers > div')]
  .filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent))"""
# Of each chart, the width of what is drawn between its axes, as a share of its place.
DRAWN = """() => [...document.querySelectorAll('[data-chart]')].map((chart) => Math.max(
  ...[...chart.querySelectorAll('svg path.background')].map((one) => one.getBoundingClientRect().width)) / chart.clientWidth)"""
# Words over their ground: the least ratio of luminances (WCAG), of a page that is one colour.
CONTRAST = """() => {
  const light = (colour) => {
    const shares = colour.match(/[\\d.]+/g).map((one) => one / 255);
    const [r, g, b] = shares.map((c) => (c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const words = [...document.querySelectorAll('.first :is(dt, dd, b, h2, h3, p, a, .how), #about')]
    .map((one) => getComputedStyle(one).color);
  const drawn = [...document.querySelectorAll('.first svg text')].map((one) => getComputedStyle(one).fill);
  const inside = new Set(['rgb(255, 255, 255)', 'rgb(0, 0, 0)']);  // on a bar of its own
  return Math.min(...[...words, ...drawn.filter((one) => !inside.has(one))].map(light)
    .map((one) => (Math.max(one, ground) + .05) / (Math.min(one, ground) + .05)));
}"""


@pytest.fixture(scope="module")
def pages(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    return {
        "trace": report(NAIVE, output=folder / "trace.html"),
        "tuning": report(TUNED, output=folder / "tuning.html"),
    }


@pytest.mark.parametrize(
    ("name", "labels", "picture"),
    [("trace", ["Now", "Reachable", "Limit"], "waterfall"), ("tuning", ["Before", "Tuned", "Limit"], "staircase")],
)
def test_the_first_screen_has_the_numbers_the_picture_and_the_changes(opened, pages, name, labels, picture):
    page, _ = opened(pages[name], width=1280)
    page.set_viewport_size({"width": 1280, "height": 800})
    all_drawn(page)
    assert page.locator(".numbers dt").all_inner_texts() == labels
    assert "NVIDIA H200" in page.locator("h1").inner_text()
    for seen in (".numbers", f"#chart-{picture} svg", ".changes li:nth-child(3)"):
        box = page.locator(seen).bounding_box()
        assert box["y"] >= 0, seen
        assert box["y"] + box["height"] <= 800, seen
        assert 0 <= box["x"] < box["x"] + box["width"] <= 1280, seen
    boxes = [page.locator(seen).bounding_box() for seen in (f"#chart-{picture}", ".changes")]
    assert sum(box["width"] for box in boxes) > 0.9 * 1280  # no third is empty


SCREENS = [(name, width) for name in ("trace", "tuning") for width in (390, 1024, 1280)]
QUICK = {("trace", 390), ("tuning", 1280)}


@pytest.mark.parametrize(
    ("name", "width"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in SCREENS]
)
def test_nothing_is_cut_off_or_pale(opened, pages, name, width):
    for theme in ("light", "dark"):
        page, heard = opened(pages[name], width=width, theme=theme)
        all_drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(CONTRAST) > 4.5
        assert min(page.evaluate(DRAWN)) > 0.4
        assert (heard.requests, heard.errors, heard.console) == ([], [], [])


def test_numbers_have_four_digits_at_most(opened, pages):
    for path in pages.values():
        page, _ = opened(path)
        shown = page.locator("td.right, .numbers b, .changes b").all_text_contents()
        numbers = [number for text in shown for number in re.findall(r"\d[\d.]*", text)]
        assert len(numbers) > 60
        digits = [number.replace(".", "").lstrip("0") for number in numbers]
        assert [one for one in digits if len(one.rstrip("0")) > 4] == []


def test_the_recipe_is_copied_as_it_is(opened, pages):
    page, _ = opened(pages["tuning"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("section:has(#recipe) [data-code]").first.click()
    page.locator("#said", has_text="copied the code").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith('precision = "bf16-master"\nattention = "flash"\n')
    assert copied.endswith('graph = "on"\n')


def test_the_picture_is_copied_as_an_image(opened, pages):
    page, heard = opened(pages["trace"], theme="dark")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("[data-image=waterfall]").click()
    page.locator("#said", has_text="copied as an image").wait_for()
    assert page.evaluate("navigator.clipboard.read().then((items) => items[0].types)") == ["image/png"]
    assert (heard.requests, heard.errors) == ([], [])


def test_where_images_cannot_be_copied_there_is_a_file_to_save(opened, pages):
    page, _ = opened(pages["trace"], theme="dark")
    page.evaluate("() => { navigator.clipboard.write = () => Promise.reject(new Error('no')); }")
    page.locator("[data-image=waterfall]").click()
    link = page.get_by_role("link", name="waterfall.png")
    with page.expect_download() as download:
        link.click()
    data = download.value.path().read_bytes()
    assert download.value.suggested_filename == "waterfall.png"
    assert data.startswith(PNG)
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 2 * 400 < 4 * height
    # The picture has the page's ground and words of another colour on it: nothing was lost on the way.
    colours = page.evaluate(
        """async (data) => {
          const image = new Image();
          image.src = `data:image/png;base64,${data}`;
          await image.decode();
          const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
          [canvas.width, canvas.height] = [image.width, image.height];
          pen.drawImage(image, 0, 0);
          const pixels = pen.getImageData(0, 0, image.width, image.height).data, counts = {};
          for (let i = 0; i < pixels.length; i += 4) {
            const colour = pixels.slice(i, i + 3).join();
            counts[colour] = (counts[colour] ?? 0) + 1;
          }
          return counts;
        }""",
        base64.b64encode(data).decode(),
    )
    assert max(colours, key=colours.get) == "18,22,27"  # --ground
    assert {"230,233,237", "0,158,115"} <= set(colours)  # --ink, and the ideal's bar


def test_a_table_that_goes_on_says_so_until_its_end(opened, pages):
    page, _ = opened(pages["trace"], width=390)
    frame = page.locator("section:has(#kernels) .frame")
    frame.scroll_into_view_if_needed()
    assert "more" in frame.get_attribute("class")
    frame.locator(".scroll").evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
    page.locator("section:has(#kernels) .frame:not(.more)").wait_for()


def test_a_long_table_is_folded_until_asked(opened, pages):
    page, _ = opened(pages["trace"])
    rows, button = page.locator("section:has(#kernels) tbody tr"), page.locator("section:has(#kernels) [data-rows]")
    assert rows.nth(9).is_visible()
    assert not rows.nth(10).is_visible()
    button.click()
    assert rows.last.is_visible()
    assert button.count() == 0


def test_a_change_leads_to_its_evidence_and_names_have_their_sizes(opened, pages):
    page, _ = opened(pages["trace"])
    link = page.locator(".changes a").first
    link.click()
    assert page.locator("li:target h3").inner_text()
    assert page.locator("li:target").get_attribute("id") == link.get_attribute("href").removeprefix("#")
    heads = page.locator("section:has(#kernels) th, section:has(#roofline) th").evaluate_all(
        "(heads) => heads.map((one) => one.dataset.key)"
    )
    assert heads[:2] == ["op", "shapes"]
    assert heads[heads.index("name") :][:3] == ["name", "op", "shapes"]


def test_hostile_names_are_text_at_the_top(opened, tmp_path):
    part = gathered(hostile_trace(tmp_path / "t.json"), HOSTILE, HOSTILE)
    evil = replace(part, name=HOSTILE, explanation=msgspec.structs.replace(part.explanation, gpu=HOSTILE))
    (tmp_path / "r.html").write_text(html_report(Report(parts=(evil,), command=HOSTILE)))
    page, heard = opened(tmp_path / "r.html", width=390)
    all_drawn(page)
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert page.locator("#about").inner_text() == f"{shown} · {shown}"
    assert shown in page.locator(".changes p").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("window.hacked") is None
    page.evaluate("() => { navigator.clipboard.write = () => Promise.reject(new Error('no')); }")
    page.locator("[data-image=waterfall]").click()
    page.get_by_role("link", name="waterfall.png").wait_for()
    assert (heard.requests, heard.errors, heard.console) == ([], [], [])


def test_a_tuning_that_kept_nothing_has_no_staircase(opened, tmp_path):
    part = gather(TUNED)
    none = tuple(msgspec.structs.replace(one, kept=False) for one in part.tuning.attempts)
    same = msgspec.structs.replace(part.tuning, attempts=none, ended=None)
    (tmp_path / "r.html").write_text(html_report(Report(parts=(replace(part, tuning=same),))))
    page, heard = opened(tmp_path / "r.html")
    all_drawn(page)
    assert page.locator(".numbers dt").all_inner_texts() == ["Before", "Limit"]
    assert page.locator("#chart-staircase, .changes").count() == 0
    assert heard.errors == []
