"""A byte-pair encoding and its special tokens. tiktoken does the encoding."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from flopwise.errors import FlopwiseError
from flopwise.lm.tokenizer import formats
from flopwise.lm.tokenizer.patterns import HINT, pattern_of

SPECIAL = ("<|endoftext|>",)
_MOST_SPACES = 1 << 16


class Tokenizer:
    """`ranks`: the id of every token's bytes, which is also the order of the merges. `special`: ids of special tokens.

    `pattern` is a name ('gpt2', 'llama3') or a regular expression. `decode(encode(text)) == text` for any text.
    """

    def __init__(self, ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> None:
        self.ranks, self.special, self.pattern = dict(ranks), dict(special), pattern

    @cached_property
    def size(self) -> int:
        """Ids lie below this: the vocabulary of a model."""
        return max([*self.ranks.values(), *self.special.values()]) + 1

    @property
    def merges(self) -> int:
        """How many merges were learnt: fewer than asked for where the text had no more pairs."""
        return sum(len(token) > 1 for token in self.ranks)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same ids."""
        content = [sorted(self.ranks.items(), key=lambda item: item[1]), sorted(self.special.items()), self.pattern]
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a special token in it becomes its one id."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """The same as an array; other threads run meanwhile."""
        try:
            found = self._encoder.encode_to_numpy(_checked(text), allowed_special="all")
        except ValueError:  # a million spaces are more than tiktoken's stack holds
            parts = [self._encoder.encode_to_numpy(part, allowed_special="all") for part in _parts(text)]
            found = np.concatenate(parts)
        return cast("npt.NDArray[np.uint32]", found)

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8, as part of a character at an end, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        try:
            return b"".join(self._tokens[int(token)] for token in ids)
        except KeyError as error:
            raise FlopwiseError(f"no token has the id {error}", f"this tokenizer has ids below {self.size:,}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, or tiktoken's format if the name ends in '.tiktoken' (ranks alone, no pattern)."""
        formats.save(Path(path), self.ranks, self.special, self.pattern)

    @cached_property
    def _tokens(self) -> dict[int, bytes]:
        by_id = {number: token for token, number in self.ranks.items()}
        return by_id | {number: token.encode() for token, number in self.special.items()}

    @cached_property
    def _encoder(self) -> Any:
        try:
            import tiktoken
        except ImportError:
            raise FlopwiseError("encoding text needs the package tiktoken", HINT) from None
        words = pattern_of(self.pattern).words
        return tiktoken.Encoding("flopwise", pat_str=words, mergeable_ranks=self.ranks, special_tokens=self.special)


def read(path: str | os.PathLike[str], pattern: str = "gpt2", special: Iterable[str] = SPECIAL) -> Tokenizer:
    """Read tokenizer.json, or a file of tiktoken's; the latter holds neither pattern nor special tokens: say which."""
    return Tokenizer(*formats.read(Path(path), pattern, tuple(special)))


def _parts(text: str) -> list[str]:
    """The text, cut so that no part has too many spaces in a row."""
    long = [match.span() for match in re.finditer(r"\s+", text) if match.end() - match.start() > _MOST_SPACES]
    cuts = [0, *(at for start, end in long for at in range(start, end, _MOST_SPACES)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        hint = "read the file as UTF-8, without surrogateescape"
        raise FlopwiseError(f"character {error.start:,} is half of a surrogate pair, which no text has", hint) from None
    return text
