"""The README: short, its screens are what the commands print, its figures are in the results, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
TRACE = ROOT / "tests" / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"
SCREENS = re.findall(r"^    \$ flopwise (.*)\n((?:(?:    .*)?\n)+)", TEXT, re.MULTILINE)


def test_it_is_read_in_a_minute():
    assert len(TEXT.split()) <= 700
    assert len(SCREENS) == 3
    assert all(len(shown.strip("\n").splitlines()) <= 10 for _, shown in SCREENS)


@pytest.mark.parametrize(("words", "shown"), SCREENS[::2])  # the second is measured
def test_a_screen_is_what_the_command_prints(cli, words, shown):
    result = cli(*words.replace("trace.json.gz", str(TRACE)).split())
    assert result.returncode == 0
    printed = result.stdout.splitlines()
    for line in filter(None, (line[4:] for line in shown.splitlines())):
        assert line == "…" or line in printed


def test_its_times_are_in_the_results():
    pages = [RESULTS / "tune-2026-11.md", RESULTS / "user-models-2026-11.md"]
    measured = "".join(page.read_text() for page in pages)
    rows = re.findall(r"^\| .*\d ms.*$", TEXT, re.MULTILINE)
    times = [time for row in rows for time in re.findall(r"[\d.]+ ms", row)]
    assert len(times) == 12
    assert [time for time in times if time not in measured] == []


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 8
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
