"""The two files in which tokenizers are kept: tokenizer.json of `tokenizers`, and tiktoken's list of ranks."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flopwise.atomic import write_atomically
from flopwise.errors import FlopwiseError
from flopwise.lm.tokenizer.patterns import name_of, pattern_of

Parts = tuple[dict[bytes, int], dict[str, int], str]  # ranks, special tokens, pattern
_TIKTOKEN = ".tiktoken"
_LARGEST = 64 << 20  # those of 200,000 tokens have 28 MB
_HINT = "flopwise reads byte-level BPE: tokenizer.json as of GPT-2 or Llama 3, or tiktoken's NAME.tiktoken"


def _characters() -> list[str]:
    """The character that stands for each byte in tokenizer.json: itself where it is printable, else one from U+0100 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


_CHARACTERS = _characters()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


def save(path: Path, ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> None:
    text = _tiktoken(ranks) if path.suffix == _TIKTOKEN else _json(ranks, special, pattern)
    try:
        write_atomically(path, text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FlopwiseError(f"cannot write {path}: {reason}", "choose another place") from None


def read(path: Path, pattern: str, special: Sequence[str]) -> Parts:
    try:
        if path.stat().st_size > _LARGEST:
            raise FlopwiseError(f"{path} is larger than {_LARGEST >> 20} MiB", "is it a tokenizer?")
        if path.is_fifo():
            raise FlopwiseError(f"cannot read {path}: it is a pipe, not a file", "write it to a file first")
        text = path.read_bytes()
    except OSError as error:
        raise FlopwiseError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", "check the path") from None
    try:
        parts = _read_tiktoken(text, special, pattern) if path.suffix == _TIKTOKEN else _read_json(text)
        _check(parts)
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise FlopwiseError(f"{path} is not a tokenizer that can be used: {error}", _HINT) from None
    return parts


def _check(parts: Parts) -> None:
    ranks, special, _ = parts
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"it has no token for byte {missing[0]}")
    ids = [*ranks.values(), *special.values()]
    if len(set(ids)) < len(ids) or min(ids) < 0:
        raise ValueError("two tokens have the same id, or one a negative id")


def _tiktoken(ranks: Mapping[bytes, int]) -> bytes:
    rows = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in rows)


def _read_tiktoken(text: bytes, special: Sequence[str], pattern: str) -> Parts:
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a token and its rank") from None
    after = max(ranks.values(), default=0) + 1
    return ranks, {token: after + i for i, token in enumerate(special)}, pattern


def _json(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> bytes:
    def text(token: bytes) -> str:
        return "".join(map(_CHARACTERS.__getitem__, token))

    rows = sorted(ranks.items(), key=lambda item: item[1])
    pairs = [merged_from(token, ranks) for token, _ in rows if len(token) > 1]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": pattern_of(pattern).words}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": None in pairs,  # tokens that no merge makes are found whole, as tiktoken finds them
        "vocab": {text(token): rank for token, rank in rows},
        "merges": [f"{text(pair[0])} {text(pair[1])}" for pair in pairs if pair is not None],
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def merged_from(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that this one is made of: what encoding it leaves, with only the merges before its own.

    >>> merged_from(b"est", {b"e": 0, b"s": 1, b"t": 2, b"st": 3, b"est": 4})
    (b'e', b'st')
    """
    parts, own = [bytes([byte]) for byte in token], ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1))
        if rank >= own:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]
    type: str = "BPE"


class _Json(msgspec.Struct):
    model: _Model
    pre_tokenizer: dict[str, Any]
    added_tokens: list[_Added] = []
    normalizer: dict[str, Any] | None = None


def _read_json(text: bytes) -> Parts:
    found = msgspec.json.decode(text, type=_Json)
    if found.model.type != "BPE" or found.normalizer is not None:
        raise ValueError("it is no BPE, or changes the text before it encodes it")
    special = {added.content: added.id for added in found.added_tokens}
    vocabulary = {token: number for token, number in found.model.vocab.items() if token not in special}
    ranks = {bytes(_BYTES[character] for character in token): number for token, number in vocabulary.items()}
    merges = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in found.model.merges]
    ids = [vocabulary[token] for token in merges]
    if ids != sorted(ids):
        raise ValueError("its ids are not in the order of its merges")
    return ranks, special, _pattern(found.pre_tokenizer)


def _pattern(step: dict[str, Any]) -> str:
    """The pattern of a pre-tokenizer: ByteLevel has GPT-2's, else one Split comes before it."""
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    level = steps[-1]
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space"):
        raise ValueError("it does not work on bytes as they are")
    if len(steps) == 1 and level.get("use_regex", True):
        return "gpt2"
    if len(steps) != 2 or steps[0].get("type") != "Split" or level.get("use_regex", True):
        raise ValueError("it cuts text in more than one way")
    return name_of(str(steps[0]["pattern"]["Regex"]))
