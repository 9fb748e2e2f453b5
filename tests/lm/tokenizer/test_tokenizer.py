"""A tokenizer: text comes back whole, both libraries give its ids, and its files are theirs."""

import json
import sys

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe

from flopwise.errors import FlopwiseError
from flopwise.lm.tokenizer import PATTERNS, Tokenizer, read, train
from flopwise.lm.tokenizer.formats import merged_from

END = "<|endoftext|>"
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(["low", " lower", "est", "'S", "\n \n", "  ", "42", "é", "中", END])).map("".join),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = [
        f"{a}{b} {b}'{a}, {b}\n"
        for a in ("low", "new", "wid", "caf é", "中 文")
        for b in ("er", "est", "ness", "12345")
    ]
    file.write_text(f"{''.join(words)}{END}  aaaaaaa\n\n" * 3, encoding="utf-8")
    return file


@pytest.fixture(scope="module", params=PATTERNS)
def tokenizer(request, corpus):
    return train(corpus, 300, request.param, (END, "<|pad|>"))


@pytest.fixture(scope="module")
def by_both(tokenizer, tmp_path_factory):
    """The same files, read and encoded by the two libraries alone."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer.save(folder / "tokenizer.json")
    tokenizer.save(folder / "ranks.tiktoken")
    ranks = load_tiktoken_bpe(str(folder / "ranks.tiktoken"))
    words = PATTERNS[tokenizer.pattern].words
    theirs = tiktoken.Encoding("x", pat_str=words, mergeable_ranks=ranks, special_tokens=tokenizer.special)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), theirs, folder


def test_its_size_is_what_was_asked_for(tokenizer):
    assert (tokenizer.size, tokenizer.merges, tokenizer.special) == (300, 42, {END: 298, "<|pad|>": 299})


@settings(max_examples=300)
@given(TEXTS)
def test_text_comes_back_and_both_libraries_agree(tokenizer, by_both, sample):
    ids = tokenizer.encode(sample)
    assert tokenizer.decode(ids) == sample
    assert tokenizer.encode_array(sample).tolist() == ids
    hugging_face, theirs, _ = by_both
    assert hugging_face.encode(sample).ids == ids
    assert hugging_face.decode(ids, skip_special_tokens=False) == sample
    assert theirs.encode(sample, allowed_special="all") == ids


def test_more_spaces_than_tiktoken_can_take_come_back(tokenizer):
    sample = f"a{' ' * 1_010_000}x{END}"
    assert tokenizer.decode(tokenizer.encode(sample)) == sample


def test_the_lectures_text(tmp_path):
    """Words cut at spaces alone, as the lecture cuts them."""
    file = tmp_path / "text.txt"
    file.write_text(
        "low low low low low\nlower lower widest widest widest\nnewest newest newest newest newest newest\n"
    )
    learnt = train(file, 262, r"\S+", special=())
    assert [learnt.decode([number]) for number in range(256, 262)] == ["st", "est", "ow", "low", "west", "ne"]


def test_a_special_token_is_one_id(tokenizer):
    assert tokenizer.encode(f"low{END}")[-1] == tokenizer.special[END]
    assert tokenizer.encode(END) == [tokenizer.special[END]]


def test_what_is_saved_is_read_again(tokenizer, by_both):
    folder = by_both[2]
    again = read(folder / "tokenizer.json")
    assert (again.fingerprint, again.pattern) == (tokenizer.fingerprint, tokenizer.pattern)
    ranks = read(folder / "ranks.tiktoken", tokenizer.pattern, tuple(tokenizer.special))
    assert ranks.fingerprint == tokenizer.fingerprint


def test_the_other_librarys_own_tokenizer_is_read(corpus, tmp_path):
    """Its ids begin with the special token, its merges are pairs, and its pattern is implied."""
    model = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    model.train([str(corpus)], vocab_size=280, special_tokens=[END], show_progress=False)
    model.save(str(tmp_path / "tokenizer.json"))
    sample = f"lowest widest{END} neé\n\n  x"
    assert read(tmp_path / "tokenizer.json").encode(sample) == model.encode(sample).ids


def test_merges_are_recovered_from_ranks(tokenizer):
    pairs = [merged_from(token, tokenizer.ranks) for token in tokenizer.ranks if len(token) > 1]
    assert len(pairs) == tokenizer.merges
    assert all(tokenizer.ranks[a] < tokenizer.ranks[a + b] > tokenizer.ranks[b] for a, b in pairs)
    assert merged_from(b"abc", {b"a": 0, b"b": 1, b"c": 2, b"abc": 3}) is None


def test_a_token_that_no_merge_makes_is_found_whole(tokenizer, tmp_path):
    ranks = {**tokenizer.ranks, b"xyzzy": tokenizer.size}
    Tokenizer(ranks, {}, "gpt2").save(tmp_path / "tokenizer.json")
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("xyzzy").ids == [tokenizer.size]
    assert read(tmp_path / "tokenizer.json").encode("xyzzy") == [tokenizer.size]


@pytest.mark.parametrize("size", [0, 255, 256, -1, 10_000_000])
def test_a_vocabulary_that_cannot_be(corpus, size):
    with pytest.raises(FlopwiseError, match="vocabulary") as caught:
        train(corpus, size)
    assert "257" in caught.value.hint


def test_a_text_too_small_for_the_vocabulary_has_fewer_merges(corpus):
    small = train(corpus, 1_000_000)
    assert small.size == 257 + small.merges < 2000


def test_bytes_alone(corpus):
    assert train(corpus, 256, special=()).encode("é") == list("é".encode())


@pytest.mark.parametrize("special", [("",), (END, END)])
def test_special_tokens_that_cannot_be(corpus, special):
    with pytest.raises(FlopwiseError, match="special token"):
        train(corpus, 300, special=special)


def test_an_id_that_no_token_has(tokenizer):
    with pytest.raises(FlopwiseError, match="300"):
        tokenizer.decode([5, 300])


def test_half_a_character_is_marked(tokenizer):
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.decode_bytes([0xC3]) == b"\xc3"


def test_half_a_surrogate_is_refused(tokenizer):
    with pytest.raises(FlopwiseError, match="character 1 is half"):
        tokenizer.encode("a\ud800")


def test_tiktoken_is_asked_for(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(FlopwiseError, match="tiktoken") as caught:
        Tokenizer(tokenizer.ranks, {}, "gpt2").encode("a")
    assert "flopwise[train]" in caught.value.hint


def changed(content, **fields):
    return json.dumps({**json.loads(content), **fields}).encode()


BAD = {
    "truncated": lambda good: good[:1000],
    "not a tokenizer": lambda good: b"{}",
    "binary": lambda good: bytes(range(256)),
    "word piece": lambda good: changed(good, model={"type": "WordPiece", "vocab": {"a": 0}, "merges": []}),
    "normalised": lambda good: changed(good, normalizer={"type": "NFC"}),
    "not of bytes": lambda good: changed(good, pre_tokenizer={"type": "Whitespace"}),
    "no bytes": lambda good: changed(good, model={"type": "BPE", "vocab": {"a": 0}, "merges": []}),
    "an unknown character": lambda good: changed(good, model={"type": "BPE", "vocab": {"中": 0}, "merges": []}),
    "an id twice": lambda good: changed(good, added_tokens=[{"id": 7, "content": "x"}]),
    "other merges": lambda good: good.replace(b'"merges": [', b'"merges": ["st est",'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_tokenizer_is_one_line(by_both, tmp_path, name):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(BAD[name]((by_both[2] / "tokenizer.json").read_bytes()))
    with pytest.raises(FlopwiseError, match="not a tokenizer that can be used"):
        read(file)


@pytest.mark.parametrize("content", [b"", b"YQ== 0\nno rank\n", b"!! 1\n", b"YQ== x\n"])
def test_ranks_that_are_none_are_one_line(tmp_path, content):
    file = tmp_path / "x.tiktoken"
    file.write_bytes(content)
    with pytest.raises(FlopwiseError, match="not a tokenizer that can be used"):
        read(file)


def test_a_file_that_is_not_there(tokenizer, tmp_path):
    with pytest.raises(FlopwiseError, match="cannot read"):
        read(tmp_path / "none.json")
    with pytest.raises(FlopwiseError, match="cannot write"):
        tokenizer.save(tmp_path / "none" / "tokenizer.json")
