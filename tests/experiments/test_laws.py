"""What holds for every experiment there is."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise.errors import FlopwiseError
from flopwise.experiments.catalog import chosen, experiments

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "appendix" / "lab.md"
EVERY = list(experiments().values())


def pages():
    spec = importlib.util.spec_from_file_location("lab_pages", ROOT / "benchmarks" / "lab_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_it_has_a_claim_a_line_a_section_and_a_test(one):
    assert one.claim.endswith(".")
    assert "\n" not in one.claim
    assert one.line.endswith(".")
    assert len(one.line) <= 130
    assert f"\n## {one.name}\n\n<!-- measured: {one.name} -->\n" in PAGE.read_text(encoding="utf-8")
    assert (Path(__file__).parent / f"test_{one.name.replace('-', '_')}.py").is_file()


def test_no_two_share_a_number():
    assert len({one.number for one in EVERY}) == len(EVERY)


def test_the_page_says_what_the_stored_runs_do():
    made, page = pages(), PAGE.read_text(encoding="utf-8")
    found = made.answers(made.STORED)
    unmeasured = set(re.findall(r"<!-- measured: (\S+) -->\n\nNot yet measured on an H200.\n", page))
    assert set(found) == {one.name for one in EVERY} - unmeasured
    assert page == made.filled(page, found), "python benchmarks/lab_pages.py"


@pytest.mark.parametrize("words", [["lab"], ["lab", "--format", "json"]])
def test_the_list_needs_no_torch(words):
    code = f"import sys; sys.modules['torch'] = None; from flopwise.cli.main import main; main({words!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert all(one.name in ended.stdout for one in EVERY)


def test_a_name_is_checked_and_all_means_all():
    with pytest.raises(FlopwiseError, match="no experiment 'warmpu'") as caught:
        chosen(("warmpu",))
    assert "did you mean 'warmup'" in caught.value.hint
    assert next(one.name for one in chosen(("warmup", "all"))) == "warmup"
    assert len(chosen(("warmup", "all"))) == len(EVERY)
