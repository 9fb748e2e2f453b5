"""What a folder of token shards holds."""

import msgspec

SCHEMA = 1
TRAIN, EVALUATION = "train", "evaluation"


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One file of tokens: a part of one piece of text."""

    part: str  # TRAIN or EVALUATION
    file: str  # in the manifest's folder
    tokens: int
    crc32: int  # of the file


class TextPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the text, and the shards that were made of it."""

    number: int
    text_bytes: int
    text_crc32: int
    shards: tuple[Shard, ...] = ()


class CorpusManifest(msgspec.Struct, frozen=True, kw_only=True, tag="corpus"):
    """The shards of a corpus in order, each piece once it is written."""

    schema: int = SCHEMA
    complete: bool = False
    dtype: str  # of a token in a shard: 'uint16' or 'uint32', little-endian
    vocabulary: int
    tokenizer: str  # its fingerprint
    held_out: float  # share of each piece of text that is kept for evaluation
    piece_bytes: int
    pieces: tuple[TextPiece, ...] = ()
