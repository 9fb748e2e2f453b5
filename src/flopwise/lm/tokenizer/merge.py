"""Which pairs to merge: byte-pair encoding learnt from words and their counts.

All words lie in one array, a linked list of tokens. Two facts keep every step small:

- A pair's count only falls once both its tokens exist: each place of (a, b) appears when the newer of the two is made. So
  the count of that moment is an upper bound, kept in a heap, and is counted anew only when it reaches the top.
- The places that a pair had at that moment are all it will ever have: only they are looked at, never other words.
"""

import heapq
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]
Merge = tuple[int, int]

_END = "\u0100"  # after every byte: of two tokens, one the beginning of the other, the longer is the greater
_INVERTED = bytes(255 - byte for byte in range(256))


def learn(words: Mapping[str, int], merges: int, progress: Callable[[int], None] | None = None) -> list[Merge]:
    """Up to `merges` merges, fewer where no pair is left. Tokens 0 to 255 are the bytes, 256 + i is merge i.

    The most frequent pair is next; of equally frequent ones, the one whose bytes are greater.

    >>> learn({"low": 5, "lower": 2, "widest": 3, "newest": 6}, 2)
    [(115, 116), (101, 256)]
    """
    chain = _Chain(words)
    order = [_inverted(bytes([byte])) for byte in range(256)]
    # Entries: (−count, order of the left, order of the right, left, right, places); or, before all pairs of that count,
    # (−count, "", "", number, 0, pairs): those that came with one token and have this count or less.
    heap: list[Any] = []
    _push_rest(heap, chain.group(chain.all_pairs()), 0, 0)
    made: list[Merge] = []
    while heap and len(made) < merges:
        count, left_order, right_order, left, right, places = heapq.heappop(heap)
        if not left_order:
            _expand(heap, order, -count, left, right, places)
            continue
        places = chain.still(places, left, right)
        now = chain.count(places)
        if now != -count:
            if now:
                heapq.heappush(heap, (-now, left_order, right_order, left, right, places))
            continue
        token = 256 + len(made)
        made.append((left, right))
        order.append(left_order[:-1] + right_order)
        _push_rest(heap, chain.group(chain.merge(places, left, right, token)), 0, token)
        if progress is not None:
            progress(len(made))
    return made


def _inverted(token: bytes) -> str:
    """A string that sorts before another if the token's bytes are greater than the other's."""
    return token.translate(_INVERTED).decode("latin-1") + _END


class _Pairs(NamedTuple):
    """The pairs that came with one token, most frequent first."""

    counts: Ints
    starts: Ints  # of each pair's places
    ends: Ints
    lefts: Ints
    rights: Ints
    places: Ints


def _push_rest(heap: list[Any], pairs: _Pairs, first: int, number: int) -> None:
    if first < len(pairs.counts):
        heapq.heappush(heap, (-int(pairs.counts[first]), "", "", number, first, pairs))


def _expand(heap: list[Any], order: list[str], count: int, number: int, first: int, pairs: _Pairs) -> None:
    """Put all pairs of this count on the heap one by one, and the rest behind them."""
    end = int(np.searchsorted(-pairs.counts, -count, side="right"))
    for i in range(first, end):
        left, right = int(pairs.lefts[i]), int(pairs.rights[i])
        places = pairs.places[pairs.starts[i] : pairs.ends[i]]
        heapq.heappush(heap, (-count, order[left], order[right], left, right, places))
    _push_rest(heap, pairs, end, number)


class _Chain:
    """Every word's tokens, each with the place of the one before and after it; the last place stands for 'none'."""

    def __init__(self, words: Mapping[str, int]) -> None:
        encoded = [word.encode() for word in words]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        text = np.frombuffer(b"".join(encoded), np.uint8)
        size = len(text)
        place = np.int32 if size < 2**31 - 1 else np.int64
        self.tokens = np.full(size + 1, -1, np.int32)
        self.tokens[:-1] = text
        self.after = np.arange(1, size + 2, dtype=place)
        self.before = np.arange(-1, size, dtype=place)
        ends = np.cumsum(lengths)
        self.after[ends - 1] = size
        self.before[ends - lengths] = size
        counts = np.fromiter(words.values(), np.int64, len(encoded))
        narrow = np.uint32 if len(counts) and counts.max() < 2**32 else np.int64
        self.weights = np.repeat(counts.astype(narrow), lengths)

    def all_pairs(self) -> Ints:
        return np.flatnonzero(self.after[:-1] != len(self.tokens) - 1).astype(self.after.dtype)

    def still(self, places: Ints, left: int, right: int) -> Ints:
        """Of the places that a pair had, those that it still has."""
        kept: Ints = (self.tokens[places] == left) & (self.tokens[self.after[places]] == right)
        return places[kept]

    def count(self, places: Ints) -> int:
        return int(self.weights[places].sum(dtype=np.int64))

    def merge(self, places: Ints, left: int, right: int, token: int) -> Ints:
        """Make one token of each of these pairs; returns the places of the pairs that are new."""
        if left == right:
            places = self._every_other(places)
        second = self.after[places]
        third = self.after[second]
        self.tokens[places], self.tokens[second] = token, -1
        self.after[places], self.before[third] = third, places
        befores = self.before[places]
        neighbours = self.tokens[befores]
        # Two new tokens in a row are one pair, found by its left.
        to_the_left = befores[(neighbours >= 0) & (neighbours != token)]
        return np.concatenate((to_the_left, places[self.tokens[third] >= 0]))

    def _every_other(self, places: Ints) -> Ints:
        """Of pairs of one token with itself, those to merge: in a row of them, the first, the third…"""
        places = np.sort(places)
        begins = np.append(True, self.after[places[:-1]] != places[1:])
        index = np.arange(len(places))
        first_in_row = np.maximum.accumulate(np.where(begins, index, 0))
        chosen: Ints = places[(index - first_in_row) % 2 == 0]
        return chosen

    def group(self, places: Ints) -> _Pairs:
        lefts, rights = self.tokens[places], self.tokens[self.after[places]]
        keys = lefts.astype(np.int64) << 32 | rights
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else order
        counts = np.add.reduceat(self.weights[places], starts, dtype=np.int64) if len(keys) else order
        ends = np.append(starts[1:], len(keys))[: len(starts)]
        rank = np.argsort(-counts, kind="stable")
        keys = keys[starts][rank]
        return _Pairs(counts[rank], starts[rank], ends[rank], keys >> 32, keys & 0xFFFFFFFF, places)
