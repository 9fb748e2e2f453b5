"""Counting words: cutting text, in whatever pieces and by whatever process, changes nothing."""

import io
import operator
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.lm import jobs, text
from flopwise.lm.tokenizer import count
from flopwise.lm.tokenizer.patterns import PATTERNS, words_of

AWKWARD = "a1é中 \n\r\t\x1c\x85\u3000'sL.!_<>|\U0001f600"
SPECIAL = ("<end of text>", "<|x|>", "<|x|>|x|>")


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=500)
@given(st.text(AWKWARD, max_size=40))
def test_runs_cut_only_where_the_pattern_cuts(name, sample):
    assert count.count_text(sample, name) == Counter(regex.findall(PATTERNS[name].words, sample))


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=500)
@given(st.lists(st.one_of(st.text(AWKWARD, max_size=6), st.sampled_from(SPECIAL))).map("".join), st.integers(0, 60))
def test_a_border_is_never_inside_a_word_or_a_special_token(name, sample, at):
    raw = sample.encode()
    end = text.border(io.BytesIO(raw), min(at, len(raw)), len(raw), SPECIAL)
    assert end >= min(at, len(raw))
    parts = raw[:end].decode(), raw[end:].decode()
    together = count.count_text(parts[0], name, SPECIAL) + count.count_text(parts[1], name, SPECIAL)
    assert together == count.count_text(sample, name, SPECIAL)
    assert sum(sample.count(one) for one in SPECIAL) == sum(part.count(one) for part in parts for one in SPECIAL)


def test_a_word_without_end_is_cut_between_characters(monkeypatch):
    monkeypatch.setattr(text, "_WIDEST", text._WINDOW)
    raw = ("é" * 20_000).encode()
    assert text.border(io.BytesIO(raw), 101, len(raw)) == 102


def test_pieces_and_processes_change_no_count(tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text("one two <end of text>three\n\nfour's 5 six7 " * 3000, encoding="utf-8")
    monkeypatch.setattr(count, "PIECE_BYTES", 20_000)
    whole = count.count_text(file.read_text(encoding="utf-8"), "llama3", SPECIAL)
    assert count.count_words(file, "llama3", SPECIAL, processes=1) == whole
    assert count.count_words([file], "llama3", SPECIAL, processes=2) == whole
    assert len(text.cut([file], 20_000, SPECIAL)) > 4


def test_a_special_token_ends_a_word():
    assert count.count_text("new<|x|>est", "gpt2", SPECIAL) == Counter(["new", "est"])


def test_a_pattern_of_ones_own():
    assert count.count_text("ab-cd", r"\p{L}") == Counter("abcd")


@pytest.mark.parametrize(("pattern", "says"), [("gpt9", "unknown"), ("(", "no regular"), ("(a)", "captures")])
def test_a_pattern_that_is_none(pattern, says):
    with pytest.raises(FlopwiseError, match=says):
        count.count_text("text", pattern)


def test_regex_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "regex", None)
    with pytest.raises(FlopwiseError, match="regex") as caught:
        words_of(PATTERNS["gpt2"])
    assert "flopwise[train]" in caught.value.hint


def test_of_very_many_words_the_rarest_are_left_out(tmp_path, monkeypatch):
    file, notes = tmp_path / "text.txt", []
    file.write_text(" ".join(f"often rare{n}" for n in range(1000)))
    whole = count.count_words(file, "gpt2", (), 1, notes.append)
    assert len(whole) > 1000
    assert notes == []
    monkeypatch.setattr(count, "PIECE_BYTES", 1000)
    monkeypatch.setattr(count, "MOST_WORDS", 50)
    kept = count.count_words(file, "gpt2", (), 1, notes.append)
    assert kept[" often"] == whole[" often"] == 999
    assert len(kept) == 50
    assert len(notes) == 1
    monkeypatch.setattr(count, "MOST_LETTERS", 100)
    assert sum(map(len, count.count_words(file, "gpt2", (), 1))) <= 100


def test_text_that_is_not_utf_8_names_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(count, "PIECE_BYTES", 1000)
    file = tmp_path / "latin.txt"
    file.write_bytes(b"word " * 1000 + b"caf\xe9 " + b"word " * 1000)
    for processes in (1, 2):
        with pytest.raises(FlopwiseError, match=r"latin.txt is not UTF-8: byte 0xe9 at offset 5,003"):
            count.count_words(file, "gpt2", (), processes)


@pytest.mark.parametrize("content", [None, b""])
def test_no_text(tmp_path, content):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FlopwiseError, match=r"text.txt"):
        count.count_words(file, "gpt2", ())
    with pytest.raises(FlopwiseError, match="not a file"):
        count.count_words(tmp_path, "gpt2", ())
    with pytest.raises(FlopwiseError, match="no file was given"):
        count.count_words([], "gpt2", ())


def test_a_file_that_shrinks(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("short")
    with pytest.raises(FlopwiseError, match="shorter"):
        text.Piece(file, 0, 9, True).read()


def test_jobs_in_processes_come_in_order():
    assert list(jobs.run_jobs(operator.mul, [(2, n) for n in range(7)], 2)) == [0, 2, 4, 6, 8, 10, 12]


def test_a_job_may_print():
    assert list(jobs.run_jobs(print, [("to stderr",)] * 2, 2)) == [None, None]


def test_a_process_that_dies_is_one_line():
    with pytest.raises(FlopwiseError, match="exit code 7"):
        list(jobs.run_jobs(os._exit, [(7,), (7,)], 2))


def test_the_first_border_is_found_past_a_long_word(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("x" * 30_000 + " end")
    assert [piece.end for piece in text.cut([Path(file)], 100)] == [30_000, 30_004]
