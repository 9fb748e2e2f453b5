"""A folder of token shards: its manifest, and every shard checked against it."""

import errno
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flopwise.errors import FlopwiseError
from flopwise.lm.jobs import cores
from flopwise.lm.tokenizer.tokenizer import Tokenizer, read
from flopwise.records.corpus import SCHEMA, CorpusManifest, Shard

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
AGAIN = "prepare it again from its text: whole shards are kept"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_BLOCK = 1 << 22
_MOST_BYTES = 64 << 20  # of a manifest: half a million shards
_OPEN = 256  # shards mapped at a time: each takes a file descriptor


class Corpus:
    """Tokens of a prepared text, memory-mapped."""

    def __init__(self, folder: Path, manifest: CorpusManifest) -> None:
        self.folder, self.manifest = folder, manifest

    @property
    def vocabulary(self) -> int:
        """Every token is below this."""
        return self.manifest.vocabulary

    def part(self, part: str) -> "Tokens":
        """The tokens for training ('train') or those held out ('evaluation')."""
        return Tokens(self.folder, shards_of(self.manifest, part), DTYPES[self.manifest.dtype])

    def tokens(self, part: str) -> int:
        """How many tokens a part has."""
        return sum(shard.tokens for shard in shards_of(self.manifest, part))

    def tokenizer(self) -> Tokenizer:
        """The one that made the tokens; it lies in the same folder."""
        return read(self.folder / TOKENIZER)


class Tokens:
    """Shards one after the other, as one array that is read by slices."""

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype[Any]) -> None:
        self.ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self._map = lru_cache(_OPEN)(lambda index: np.memmap(folder / shards[index].file, dtype, "r"))

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the tokens from `start` on."""
        index, done = int(np.searchsorted(self.ends, start, side="right")), 0
        while done < len(out):
            shard = self._map(index)
            first = start + done - (int(self.ends[index]) - len(shard))
            found = shard[first : first + len(out) - done]
            out[done : done + len(found)] = found
            done, index = done + len(found), index + 1


def open_corpus(folder: str | Path, check: bool = True) -> Corpus:
    """A prepared corpus. Sizes are always checked, checksums (every shard is read once) unless `check` is false."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FlopwiseError(f"{folder} holds no corpus: there is no {MANIFEST}", "prepare one from text first")
    if not manifest.complete:
        raise FlopwiseError(f"the corpus in {folder} was not finished", AGAIN)
    shards = shards_of(manifest)
    with ThreadPoolExecutor(cores()) as pool:
        problems = pool.map(lambda shard: problem(folder, shard, manifest.dtype, check), shards)
        for shard, found in zip(shards, problems, strict=True):
            if found:
                pool.shutdown(cancel_futures=True)
                raise FlopwiseError(f"shard {folder / shard.file} {found}", AGAIN)
    return Corpus(folder, manifest)


def shards_of(manifest: CorpusManifest, part: str = "") -> list[Shard]:
    return [shard for piece in manifest.pieces for shard in piece.shards if part in ("", shard.part)]


def read_manifest(folder: Path) -> CorpusManifest | None:
    """The folder's manifest; None where there is none."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FlopwiseError(
                f"{path} is larger than {_MOST_BYTES >> 20} MiB", "remove the folder and prepare it again"
            )
        manifest = msgspec.json.decode(path.read_bytes(), type=CorpusManifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise FlopwiseError(f"{path} cannot be read: {error}", "remove the folder and prepare it again") from None
    if manifest.schema > SCHEMA or manifest.dtype not in DTYPES:
        raise FlopwiseError(f"{path} is of a newer flopwise (schema {manifest.schema})", "pip install -U flopwise")
    bad = next((shard.file for shard in shards_of(manifest) if Path(shard.file).name != shard.file), None)
    if bad is not None:
        raise FlopwiseError(f"{path} names a shard outside its folder: {bad}", "remove the folder and prepare it again")
    return manifest


def problem(folder: Path, shard: Shard, dtype: str, check: bool = True) -> str:
    """What is wrong with a shard's file; '' if nothing is."""
    path, size = folder / shard.file, shard.tokens * DTYPES[dtype].itemsize
    try:
        there = path.stat().st_size
        if there != size:
            return f"has {there:,} bytes instead of {size:,}"
        return "has changed since it was written" if check and checksum(path) != shard.crc32 else ""
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {(error.strerror or str(error)).lower()}"


def checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def unwritable(path: Path, error: OSError) -> FlopwiseError:
    """What a user sees of a full disk, or a folder that cannot be written to."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "free some space, then run the same again: what is written is kept" if full else "choose another folder"
    return FlopwiseError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", hint)
