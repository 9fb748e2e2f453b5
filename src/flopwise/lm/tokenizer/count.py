"""How often each word occurs in text files, counted by several processes, with no more than a piece of text in each."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing

from flopwise.lm.jobs import run_jobs
from flopwise.lm.text import Paths, Piece, cut, text_files
from flopwise.lm.tokenizer.patterns import pattern_of, runs_of, words_of

PIECE_BYTES = 16 << 20
MOST_WORDS, MOST_LETTERS = 1_000_000, 16_000_000  # that pairs are looked for in: within 1 GB


def count_words(
    paths: Paths,
    pattern: str,
    special: Sequence[str],
    processes: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Counter[str]:
    """Words of all files with their counts. Special tokens are no words, and end the word before them.

    Of very many words the rarest are left out, and `note` is told.
    """
    words_of(pattern_of(pattern))  # what is wrong with it is said before any process starts
    pieces = cut(text_files(paths), PIECE_BYTES, special)
    counts, left_out = Counter[str](), False
    jobs = [(piece, pattern, tuple(special)) for piece in pieces]
    with closing(run_jobs(count_piece, jobs, processes)) as results:
        for found in results:
            counts.update(found)
            if len(counts) > 2 * MOST_WORDS or sum(map(len, counts)) > 2 * MOST_LETTERS:
                counts, left_out = most_frequent(counts, MOST_WORDS, MOST_LETTERS), True
    kept = most_frequent(counts, MOST_WORDS, MOST_LETTERS)
    if left_out or len(kept) < len(counts):
        note(f"the vocabulary is learnt from the {len(kept):,} most frequent words: rarer ones are left out")
    return kept


def most_frequent(counts: Counter[str], words: int, letters: int) -> Counter[str]:
    """So many words at most, with so many characters together; a word that is longer than what is left is passed over.

    >>> most_frequent(Counter("to be or not to be".split()), 3, 5)
    Counter({'to': 2, 'be': 2})
    """
    if len(counts) <= words and sum(map(len, counts)) <= letters:
        return counts
    kept: Counter[str] = Counter()
    for word, count in counts.most_common(words):
        if len(word) <= letters:
            kept[word] = count
            letters -= len(word)
    return kept


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
