"""From text files to a tokenizer."""

from collections.abc import Callable, Sequence

from flopwise.errors import FlopwiseError
from flopwise.lm.text import Paths
from flopwise.lm.tokenizer.count import count_words
from flopwise.lm.tokenizer.merge import Merge, learn
from flopwise.lm.tokenizer.tokenizer import SPECIAL, Tokenizer

LARGEST = 1_000_000


def train(
    paths: Paths,
    vocab_size: int,
    pattern: str = "gpt2",
    special: Sequence[str] = SPECIAL,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Tokenizer:
    """Learn `vocab_size` tokens: 256 bytes, merges, then the special tokens. `Tokenizer.size` is smaller where the text is too
    small to have so many merges. `progress` is called with the number of merges so far, `note` with what was left out.
    """
    check_size(vocab_size, special)
    words = count_words(paths, pattern, special, processes, note)
    return from_merges(learn(words, vocab_size - 256 - len(special), progress), special, pattern)


def check_size(vocab_size: int, special: Sequence[str]) -> None:
    if len(set(special)) < len(special) or "" in special:
        raise FlopwiseError("a special token is empty or is given twice", "give each once")
    least = 256 + len(special)
    if not least <= vocab_size <= LARGEST:
        hint = f"use {least} (256 bytes and {len(special)} special) to {LARGEST:,}; GPT-2 has 50,257 tokens"
        raise FlopwiseError(f"a vocabulary of {vocab_size:,} tokens is not possible", hint)


def from_merges(merges: Sequence[Merge], special: Sequence[str], pattern: str) -> Tokenizer:
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in merges:
        tokens.append(tokens[left] + tokens[right])
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return Tokenizer(ranks, {token: len(tokens) + i for i, token in enumerate(special)}, pattern)
