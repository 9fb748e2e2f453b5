"""Learning merges: the lecture's example, and the definition of byte-pair encoding written out."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flopwise.lm.tokenizer.count import count_text
from flopwise.lm.tokenizer.merge import learn
from flopwise.lm.tokenizer.training import from_merges

LECTURE = {"low": 5, "lower": 2, "widest": 3, "newest": 6}


def tokens_of(merges):
    return list(from_merges(merges, (), "gpt2").ranks)[256:]


def learn_by_definition(words, merges):
    """Count every pair of every word anew for every merge."""
    split = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    made = []
    for _ in range(merges):
        counts = Counter()
        for word, tokens in split.items():
            for pair in pairwise(tokens):
                counts[pair] += words[word]
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        made.append(best[0] + best[1])
        for tokens in split.values():
            i = 0
            while i < len(tokens) - 1:
                if (tokens[i], tokens[i + 1]) == best:
                    tokens[i : i + 2] = [best[0] + best[1]]
                i += 1
    return made


def test_the_lectures_example():
    wanted = ["st", "est", "ow", "low", "west", "ne"]
    assert tokens_of(learn(LECTURE, 6)) == [token.encode() for token in wanted]


def test_it_ends_when_every_word_is_one_token():
    made = tokens_of(learn(LECTURE, 1000))
    assert len(made) == 12
    assert {word.encode() for word in LECTURE} <= set(made)


@pytest.mark.parametrize("words", [{}, {"a": 3}, {"": 1}])
def test_words_without_pairs_have_no_merges(words):
    assert learn(words, 5) == []


@settings(max_examples=300)
@given(st.dictionaries(st.text("abé", max_size=12), st.integers(1, 5), max_size=8), st.integers(0, 30))
@example({"aaaaaaa": 2, "baaab": 1}, 9)  # a pair of a token with itself overlaps itself
@example({"abababab": 1, "bababa": 3}, 9)
def test_the_merges_are_those_of_the_definition(words, merges):
    assert tokens_of(learn(words, merges)) == learn_by_definition(words, merges)


def test_counts_beyond_32_bits():
    assert tokens_of(learn({"ab": 2**31, "bc": 2**32, "abx": 2**31 + 1}, 1)) == [b"ab"]


def test_progress_counts_the_merges():
    seen = []
    learn(LECTURE, 3, seen.append)
    assert seen == [1, 2, 3]


def test_the_definition_and_the_fast_way_agree_on_prose():
    with open(__file__, encoding="utf-8") as file:
        words = count_text(file.read(), "gpt2")
    assert tokens_of(learn(words, 60)) == learn_by_definition(words, 60)
