"""How often each word occurs in text files, counted by several processes, with no more than a piece of text in each."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from flopwise.lm.jobs import run_jobs
from flopwise.lm.text import Paths, Piece, cut, text_files
from flopwise.lm.tokenizer.patterns import pattern_of, runs_of, words_of

PIECE_BYTES = 16 << 20


def count_words(paths: Paths, pattern: str, special: Sequence[str], processes: int | None = None) -> Counter[str]:
    """Words of all files with their counts. Special tokens are no words, and end the word before them."""
    words_of(pattern_of(pattern))  # what is wrong with it is said before any process starts
    pieces = cut(text_files(paths), PIECE_BYTES, special)
    counts: Counter[str] = Counter()
    jobs = [(piece, pattern, tuple(special)) for piece in pieces]
    with closing(run_jobs(count_piece, jobs, processes)) as results:
        for found in results:
            counts.update(found)
    return counts


def count_piece(piece: Piece, pattern: str, special: Sequence[str]) -> Counter[str]:
    return count_text(piece.decode(piece.read()), pattern, special)


def count_text(text: str, pattern: str, special: Sequence[str] = ()) -> Counter[str]:
    """
    >>> sorted(count_text("so low, so low", "gpt2").items())
    [(' low', 2), (' so', 1), (',', 1), ('so', 1)]
    """
    find, runs = words_of(pattern_of(pattern)), runs_of(pattern_of(pattern))
    counts: Counter[str] = Counter()
    parts = re.split("|".join(map(re.escape, sorted(special, key=len, reverse=True))), text) if special else [text]
    if runs is None:
        for part in parts:
            counts.update(find(part))
        return counts
    whole: Counter[str] = Counter()
    for part in parts:
        whole.update(runs(part))
    for run, count in whole.items():
        for word in find(run):
            counts[word] += count
    return counts
