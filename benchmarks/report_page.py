"""What a page costs: to build it from a trace, in bytes, and to open it in Chromium.

    python benchmarks/report_page.py [TRACE…] [--mb 1000] [--opens 3] [--keep FOLDER]

Without traces, the two of tests/trace/fixtures. `--mb` adds a generated one of about that size (24 layers, eager, kernel names
of an H100). The page is opened from the disk with the network off, in a fresh browser process each time, at 1200 × 900. 'first
view' is from the start of the navigation until the first view is complete: all text, and every chart that is in sight is drawn;
'every chart' is until each chart of the page is drawn, as printing asks for, from the same start.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIXTURES = sorted((ROOT / "tests" / "trace" / "fixtures").glob("*.kineto.json.gz"))
CHROMIUM = os.environ.get("FLOPWISE_CHROMIUM", "/usr/bin/chromium")
IN_SIGHT = """() => [...document.querySelectorAll('[data-chart]')].every((chart) => {
  const box = chart.getBoundingClientRect();
  return box.top >= innerHeight || box.bottom <= 0 || chart.dataset.ready;
}) && document.querySelector('#theme').textContent && performance.now()"""


def build(trace: Path, page: Path) -> tuple[float, float]:
    """Seconds until the command ended, and the most it held in MB."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flopwise.cli.main", "report", trace, "-o", page], check=True, stdout=2)
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def opened(page: Path) -> tuple[float, float]:
    """Milliseconds to the first view, and to every chart."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True).new_page()
        tab.goto(page.resolve().as_uri(), wait_until="commit")
        first = tab.wait_for_function(IN_SIGHT, polling="raf").json_value()
        every = tab.evaluate("async () => { await window.flopwise.drawAll(); return performance.now(); }")
        browser.close()
    return first, every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--mb", type=int, default=0)
    parser.add_argument("--opens", type=int, default=3)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    print("| trace | MB | build s | build peak MB | page MB | first view ms | every chart ms | load |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        place = given.keep or Path(folder)
        place.mkdir(exist_ok=True, parents=True)
        traces = given.traces or FIXTURES
        if given.mb:
            made = Path(folder) / f"generated-{given.mb}.json"
            generator = ROOT / "tests" / "trace" / "gen_kineto.py"
            subprocess.run([sys.executable, generator, made, "--mb", str(given.mb), "--shapes"], check=True, stdout=2)
            traces = [*traces, made]
        for trace in traces:
            page = place / f"{trace.name.partition('.')[0]}.html"
            seconds, peak = build(trace, page)
            times = [opened(page) for _ in range(given.opens)]
            first, every = (", ".join(f"{one[i]:.0f}" for one in times) for i in (0, 1))
            first += f" (median {statistics.median(one[0] for one in times):.0f})"
            sizes = f"{trace.stat().st_size / 1e6:,.1f} | {seconds:.1f} | {peak:,.0f} | {page.stat().st_size / 1e6:.2f}"
            print(f"| {trace.name} | {sizes} | {first} | {every} | {os.getloadavg()[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
