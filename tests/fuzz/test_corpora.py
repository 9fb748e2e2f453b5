"""Changed files of every format, always the same ones: an answer or one line with a hint, and nothing is executed.

A few of each in `make test`, minutes in `make test-all`; `python benchmarks/attack/mutations.py` goes on for as long as asked.
"""

import os
import subprocess

import pytest

from flopwise.errors import FlopwiseError
from fuzzing import CORPORA, TARGETS, Target, mutants, tried
from quick import ALL, FUZZ

BRIEF, LONG = 12, 1000
NAMES = [target.name for target in TARGETS]


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_what_is_kept(target, tmp_path):
    """Every file of the corpus."""
    tries = ((name, tried(target, content, tmp_path).wrong) for name, content in target.corpus.items())
    assert [one for one in tries if one[1]] == []


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_changed_files(target, tmp_path):
    seed = int.from_bytes(os.urandom(4)) if FUZZ else 1
    for content in mutants(target, seed, LONG if ALL else BRIEF):
        assert tried(target, content, tmp_path).wrong == "", (seed, content[:500])


def test_the_corpora_are_small():
    assert sum(path.stat().st_size for path in CORPORA.rglob("*") if path.is_file()) < 300_000
    assert {path.name for path in CORPORA.iterdir()} == {*NAMES, "store-whole"}


def crash(path):
    raise ZeroDivisionError


def vague(path):
    raise FlopwiseError("no", "")


def starts(path):
    subprocess.run(["true"], check=True)


def writes(path):
    path.parent.with_name("elsewhere").write_text("x")


@pytest.mark.parametrize("read", [crash, vague, starts, writes])
def test_what_is_wrong_is_seen(read, tmp_path):
    assert tried(Target("t", "t.json", read), b"{}", tmp_path).wrong
