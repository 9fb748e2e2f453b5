"""Batches: a function of their number, every window once in an epoch, the same windows whatever the number of ranks."""

import gc
import subprocess
import sys
import threading
import zlib
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.lm.data import Corpus
from flopwise.lm.data.batches import Batches
from flopwise.lm.data.shuffle import shuffled
from flopwise.records.corpus import CorpusManifest, Shard, TextPiece

SIZES = (700, 1, 300)  # of three shards; the tokens count up through all of them


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    pieces, first = [], 0
    for number, size in enumerate(SIZES):
        content = np.arange(first, first + size, dtype="<u2").tobytes()
        (folder / f"train-{number}.bin").write_bytes(content)
        shard = Shard(part="train", file=f"train-{number}.bin", tokens=size, crc32=zlib.crc32(content))
        pieces.append(TextPiece(number=number, text_bytes=0, text_crc32=0, shards=(shard,)))
        first += size
    settings = {"dtype": "uint16", "vocabulary": 1001, "tokenizer": "", "held_out": 0, "piece_bytes": 1}
    return Corpus(folder, CorpusManifest(complete=True, pieces=tuple(pieces), **settings))


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 2**40))
def test_a_shuffle_is_a_permutation(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed, np.full(size, epoch))
    assert sorted(order.tolist()) == list(range(size))


def test_a_shuffle_is_of_its_seed_and_epoch_alone():
    orders = [shuffled(np.arange(100), 100, seed, np.full(100, epoch)) for seed in range(9) for epoch in range(9)]
    assert len({tuple(order.tolist()) for order in orders}) == 81


def test_a_shuffle_looks_random():
    """Where the first and the last land, and how far neighbours are apart: each as often as chance has it."""
    size, seeds = 64, 2000
    orders = np.array([shuffled(np.arange(size), size, seed, np.zeros(size)) for seed in range(seeds)])
    apart = (orders[:, 1] - orders[:, 0]) % size
    for counts in (np.bincount(orders[:, 0]), np.bincount(orders[:, -1]), np.bincount(apart)[1:]):
        expected = seeds / len(counts)
        assert len(counts) >= size - 1
        assert ((counts - expected) ** 2 / expected).sum() < 1.7 * len(
            counts
        )  # chi squared: by chance once in a thousand


def starts(batches, numbers):
    return [int(row[0]) for number in numbers for row in batches.at(number)[0]]


def test_targets_are_the_next_tokens(corpus):
    inputs, targets = Batches(corpus, batch=4, context=20).at(3)
    assert inputs.shape == targets.shape == (4, 20)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert (targets == inputs + 1).all()  # also across shards
    assert (inputs[:, 0] % 20 == 0).all()


def test_an_epoch_is_every_window_once(corpus):
    batches = Batches(corpus, batch=5, context=20, seed=1)
    assert (batches.windows, batches.per_epoch) == (50, 10)
    first, second = starts(batches, range(10)), starts(batches, range(10, 20))
    assert sorted(first) == sorted(second) == list(range(0, 1000, 20))
    assert first != second != sorted(second)


def test_a_batch_may_span_epochs(corpus):
    batches = Batches(corpus, batch=70, context=20)
    assert Counter(starts(batches, range(5))) == dict.fromkeys(range(0, 1000, 20), 7)


@settings(max_examples=30)
@given(st.sampled_from([1, 2, 3, 6]), st.integers(0, 10**12), st.integers(0, 2**63))
def test_ranks_share_what_one_would_take(corpus, world, number, seed):
    alone = Batches(corpus, batch=6, context=20, seed=seed)
    ranks = [Batches(corpus, batch=6 // world, context=20, seed=seed, rank=rank, world=world) for rank in range(world)]
    assert alone.positions(number) == [place for rank in ranks for place in rank.positions(number)]


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_a_stream_begins_anywhere_and_says_how_long_it_was_waited_for(corpus, device):
    batches = Batches(corpus, batch=4, context=20, seed=3, device=device)
    with batches.stream(7) as stream:
        for number in range(7, 30):
            assert stream.number == number
            inputs, targets = next(stream)
            assert torch.equal(inputs, batches.at(number)[0])
            assert torch.equal(targets, batches.at(number)[1])
            assert stream.waited_seconds >= 0


def test_the_time_that_a_batch_was_waited_for(corpus, monkeypatch):
    clock = iter([10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr("flopwise.lm.data.batches.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with Batches(corpus, batch=4, context=20).stream() as stream:
        waited = [(next(stream), stream.waited_seconds)[1] for _ in range(2)]
    assert waited == [2.5, 0.5]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "flopwise-batches"]


def test_a_stream_that_is_closed_has_no_thread(corpus):
    stream = Batches(corpus, batch=4, context=20).stream()
    next(stream)
    stream.close()
    stream.close()
    assert threads() == []
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_that_is_forgotten_has_no_thread(corpus):
    stream = Batches(corpus, batch=4, context=20).stream()
    next(stream)
    del stream
    gc.collect()
    assert threads() == []


def test_an_error_of_the_thread_reaches_the_consumer(corpus, monkeypatch):
    batches = Batches(corpus, batch=4, context=20)
    monkeypatch.setattr(batches, "_read", lambda number: 1 / 0)
    with batches.stream() as stream, pytest.raises(ZeroDivisionError):
        next(stream)
    assert threads() == []


WRONG = [{"batch": 0}, {"context": 0}, {"rank": 2, "world": 2}, {"rank": -1}, {"context": 1001}, {"part": "evaluation"}]


@pytest.mark.parametrize("wrong", WRONG)
def test_batches_that_cannot_be(corpus, wrong):
    with pytest.raises(FlopwiseError):
        Batches(corpus, **{"batch": 4, "context": 20, **wrong})


def test_the_longest_context(corpus):
    inputs, targets = Batches(corpus, batch=1, context=1000).at(5)
    assert inputs[0].tolist() == list(range(1000))
    assert targets[0, -1] == 1000


BARE = """
import sys
from unittest.mock import MagicMock
sys.modules["torch"] = MagicMock()
for name in ("regex", "tiktoken", "tokenizers", "polars"):
    sys.modules[name] = None
from flopwise.lm.data import open_corpus
from flopwise.lm.data.batches import Batches
"""


def test_ready_shards_need_no_package_of_the_tokenizers():
    assert subprocess.run([sys.executable, "-c", BARE], check=False).returncode == 0
