"""Token shards: the tokens are those of the whole text, nothing finished is redone, and nothing damaged is read."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from flopwise.errors import FlopwiseError
from flopwise.lm.data import corpus as corpora
from flopwise.lm.data import open_corpus, prepare, shards
from flopwise.lm.tokenizer import read, train

END = "<|endoftext|>"
PIECE = 4000


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    words = ["the", "low", "lower", "widest", "newest", "café", "中文", "sat", "on\n\n", "", "12", "mats,", ""]
    draw = np.random.default_rng(0)
    files = []
    for number, size in enumerate((4000, 3, 5, 900)):
        files.append(folder / f"{number}.txt")
        files[-1].write_text(" ".join(draw.choice(words, size)), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train(texts, 290)


def tokens_of(corpus, part):
    tokens = corpus.part(part)
    out = np.empty(len(tokens), np.int64)
    tokens.read(0, out)
    return out.tolist()


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}


@pytest.fixture
def prepared(texts, tokenizer, tmp_path):
    return prepare(texts, tokenizer, tmp_path / "corpus", held_out=0.1, piece_bytes=PIECE)


def test_without_evaluation_it_is_the_whole_text(texts, tokenizer, tmp_path):
    corpus = prepare(texts, tokenizer, tmp_path, held_out=0, piece_bytes=PIECE)
    whole = "".join(file.read_text(encoding="utf-8") + END for file in texts)
    assert tokens_of(corpus, "train") == tokenizer.encode(whole)
    assert corpus.tokens("evaluation") == 0
    assert len(list(tmp_path.glob("train-*.bin"))) > 5


def test_a_part_of_every_piece_is_held_out(texts, tokenizer, prepared):
    parts = {part: tokens_of(prepared, part) for part in ("train", "evaluation")}
    whole = "".join(file.read_text(encoding="utf-8") + END for file in texts)
    assert len(parts["train"]) + len(parts["evaluation"]) == len(tokenizer.encode(whole))
    assert 0.08 < len(parts["evaluation"]) / len(tokenizer.encode(whole)) < 0.12
    held_out = tokenizer.decode(parts["evaluation"])
    assert held_out not in tokenizer.decode(parts["train"])
    for piece in prepared.manifest.pieces:
        assert [shard.part for shard in piece.shards] == ["train", "evaluation"]


def test_it_opens_as_it_was_written(prepared, tokenizer):
    again = open_corpus(prepared.folder)
    assert again.manifest == prepared.manifest
    assert again.tokenizer().fingerprint == tokenizer.fingerprint
    assert (again.vocabulary, again.manifest.dtype) == (290, "uint16")
    assert json.loads((prepared.folder / "manifest.json").read_text())["type"] == "corpus"


def test_a_large_vocabulary_takes_four_bytes(texts, tokenizer, tmp_path):
    large = read_with_special(tokenizer, 1 << 16)
    corpus = prepare(texts[1], large, tmp_path, held_out=0)
    assert corpus.manifest.dtype == "uint32"
    assert tokens_of(open_corpus(tmp_path), "train")[-1] == 1 << 16


def read_with_special(tokenizer, number):
    return type(tokenizer)(tokenizer.ranks, {END: number}, tokenizer.pattern)


def test_threads_change_nothing(texts, tokenizer, prepared, tmp_path):
    alone = prepare(texts, tokenizer, tmp_path / "alone", held_out=0.1, piece_bytes=PIECE, threads=1)
    assert alone.manifest == prepared.manifest


def test_progress_ends_with_all_of_the_text(texts, tokenizer, tmp_path):
    seen = []
    prepare(texts, tokenizer, tmp_path, piece_bytes=PIECE, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(file.stat().st_size for file in texts)


def test_what_is_there_is_not_written_again(texts, tokenizer, prepared):
    before = times(prepared.folder)
    again = prepare(texts, tokenizer, prepared.folder, held_out=0.1, piece_bytes=PIECE)
    assert (times(prepared.folder), again.manifest) == (before, prepared.manifest)


def test_text_that_is_added_costs_only_itself(texts, tokenizer, prepared, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("low " * PIECE, encoding="utf-8")
    before = times(prepared.folder)
    again = prepare([*texts, more], tokenizer, prepared.folder, held_out=0.1, piece_bytes=PIECE)
    after = times(prepared.folder)
    assert len(again.manifest.pieces) > len(prepared.manifest.pieces)
    kept = [name for name in before if before[name] == after[name]]
    assert len(kept) >= len(before) - 2
    assert open_corpus(prepared.folder).tokens("train") > prepared.tokens("train")


def test_text_that_is_gone_leaves_no_shard(texts, tokenizer, prepared):
    fewer = prepare(texts[1:3], tokenizer, prepared.folder, held_out=0.1, piece_bytes=PIECE)
    assert sorted(times(prepared.folder)) == sorted(s.file for piece in fewer.manifest.pieces for s in piece.shards)


DAMAGE = {
    "is missing": lambda path: path.unlink(),
    "bytes instead of": lambda path: os.truncate(path, path.stat().st_size - 2),
    "has changed": lambda path: path.write_bytes(path.read_bytes()[:-2] + b"\1\0"),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_damaged_shard_is_named_and_only_it_is_made_again(texts, tokenizer, prepared, says):
    before = times(prepared.folder)
    victim = prepared.folder / "train-00003.bin"
    DAMAGE[says](victim)
    with pytest.raises(FlopwiseError, match=f"train-00003.bin .*{says}") as caught:
        open_corpus(prepared.folder)
    assert "prepare it again" in caught.value.hint
    assert prepare(texts, tokenizer, prepared.folder, held_out=0.1, piece_bytes=PIECE).manifest == prepared.manifest
    after = times(open_corpus(prepared.folder).folder)
    assert {name for name in before if before[name] != after[name]} == {victim.name, "evaluation-00003.bin"}


def test_checksums_can_be_left_out(prepared):
    DAMAGE["has changed"](prepared.folder / "train-00003.bin")
    open_corpus(prepared.folder, check=False)


def test_another_tokenizer_is_refused(texts, tokenizer, prepared):
    with pytest.raises(FlopwiseError, match="another tokenizer"):
        prepare(texts, read_with_special(tokenizer, 300), prepared.folder, held_out=0.1, piece_bytes=PIECE)


def test_a_full_disk_keeps_what_is_written(texts, tokenizer, tmp_path, monkeypatch):
    whole, written = shards.write_atomically, []

    def write(path, content):
        if path.suffix == ".bin" and len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if path.suffix == ".bin":
            written.append(path.name)
        whole(path, content)

    monkeypatch.setattr(shards, "write_atomically", write)
    with pytest.raises(FlopwiseError, match="no space left") as caught:
        prepare(texts, tokenizer, tmp_path, held_out=0.1, piece_bytes=PIECE, threads=1)
    assert "what is written is kept" in caught.value.hint
    with pytest.raises(FlopwiseError, match="not finished"):
        open_corpus(tmp_path)
    monkeypatch.setattr(shards, "write_atomically", whole)
    before = times(tmp_path)
    prepare(texts, tokenizer, tmp_path, held_out=0.1, piece_bytes=PIECE)
    after = times(tmp_path)
    assert sum(before[name] == after[name] for name in before) == 4
    open_corpus(tmp_path)


def test_what_stops_it_stops_its_threads(texts, tokenizer, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):  # held until the test ends, with its frames
        prepare(texts, tokenizer, tmp_path, held_out=0.1, piece_bytes=200, progress=stop, threads=1)
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in left if thread.name.startswith("ThreadPoolExecutor")]
    assert corpora.read_manifest(tmp_path).pieces


SLOW = """
import sys, time
from flopwise.lm.data import shards as module
from flopwise.lm.tokenizer import read
write = module.write_atomically
def slowly(path, content):
    write(path, content)
    time.sleep(0.02)
module.write_atomically = slowly
module.prepare(sys.argv[3:], read(sys.argv[1]), sys.argv[2], held_out=0.1, piece_bytes=4000)
"""


def test_killed_and_started_again_it_ends_the_same(texts, tokenizer, prepared, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", SLOW, str(tmp_path / "tokenizer.json"), str(folder), *map(str, texts)]
    child = subprocess.Popen(command)
    while child.poll() is None:
        if len(list(folder.glob("train-*.bin"))) >= 4 and (folder / corpora.MANIFEST).exists():
            break
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    listed = corpora.read_manifest(folder)
    (folder / ".train-00009.bin-0123abcd").write_bytes(b"begun")
    before = times(folder)
    again = prepare(texts, tokenizer, folder, held_out=0.1, piece_bytes=PIECE)
    assert again.manifest == prepared.manifest == open_corpus(folder).manifest
    finished = [shard.file for piece in listed.pieces for shard in piece.shards]
    assert finished
    assert all(times(folder)[name] == before[name] for name in finished)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_text_that_is_not_utf_8_names_the_file(texts, tokenizer, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good " * 2000 + b"\xff")
    with pytest.raises(FlopwiseError, match=r"bad.txt is not UTF-8: byte 0xff at offset 10,000"):
        prepare([*texts, bad], tokenizer, tmp_path / "corpus", piece_bytes=PIECE)


@pytest.mark.parametrize("share", [-0.1, 1, float("nan")])
def test_a_share_that_is_none(texts, tokenizer, tmp_path, share):
    with pytest.raises(FlopwiseError, match="held_out"):
        prepare(texts, tokenizer, tmp_path, held_out=share)


def test_pieces_that_are_none(texts, tokenizer, tmp_path):
    with pytest.raises(FlopwiseError, match="piece_bytes"):
        prepare(texts, tokenizer, tmp_path, piece_bytes=0)


def test_a_place_that_cannot_be_written(texts, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FlopwiseError, match="cannot write"):
        prepare(texts, tokenizer, tmp_path / "file" / "corpus")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no corpus"),
        ("{", "cannot be read"),
        ('{"type": "run"}', "cannot be read"),
        ('"schema": 1', "newer flopwise"),
        ('"train-00000.bin"', "outside its folder"),
    ],
)
def test_a_manifest_that_is_none(prepared, content, says):
    file = prepared.folder / "manifest.json"
    good = file.read_text()
    changed = {'"schema": 1': '"schema": 99', '"train-00000.bin"': '"../train-00000.bin"'}
    if content is None:
        file.unlink()
    else:
        file.write_text(good.replace(content, changed[content]) if content in changed else content)
    with pytest.raises(FlopwiseError, match=says):
        open_corpus(prepared.folder)


def test_the_tokenizer_is_in_the_folder(prepared):
    assert read(prepared.folder / "tokenizer.json").decode(tokens_of(prepared, "train")[:50])
